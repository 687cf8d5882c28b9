// Where the placing allocator's memory comes from: the host's address space, or CUDA's runtime library.
#pragma once

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstddef>
#include <type_traits>

namespace sn {

// Where memory comes from. `give` waits until the device no longer uses it.
struct Source {
  void* (*take)(int device, size_t size) = nullptr;
  void (*give)(int device, void* base, size_t size) = nullptr;
  void (*wait)(int device) = nullptr;
};

inline void* host_take(int, size_t size) {
  // Address space: pages are there once somebody writes to them.
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return base == MAP_FAILED ? nullptr : base;
}
inline void host_give(int, void* base, size_t size) { munmap(base, size); }
inline void host_wait(int) {}

// Functions of CUDA's runtime, which the process has loaded: nothing here is linked to it.
struct Runtime {
  int (*malloc_)(void**, size_t) = nullptr;
  int (*free_)(void*) = nullptr;
  int (*get)(int*) = nullptr;
  int (*set)(int) = nullptr;
  int (*synchronize)() = nullptr;
  int (*last_error)() = nullptr;
};
inline Runtime cuda;

struct OnDevice {
  int before = -1;
  explicit OnDevice(int device) {
    cuda.get(&before);
    if (before != device) cuda.set(device);
  }
  ~OnDevice() { cuda.set(before); }
};

inline void* cuda_take(int device, size_t size) {
  OnDevice here(device);
  void* base = nullptr;
  if (cuda.malloc_(&base, size) == 0) return base;
  cuda.last_error();  // or the next kernel would report it
  return nullptr;
}
inline void cuda_wait(int device) {
  OnDevice here(device);
  cuda.synchronize();
}
inline void cuda_give(int device, void* base, size_t) {
  cuda_wait(device);
  OnDevice here(device);
  cuda.free_(base);
}

inline bool load_runtime(const char* library) {
  // torch has loaded it already; the name finds the same one. Where torch ships it by another name, it is
  // among the symbols of the process, for which dlsym takes no handle.
  void* handle = dlopen(library, RTLD_LAZY | RTLD_LOCAL);
  auto find = [handle](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    return function != nullptr;
  };
  return find(cuda.malloc_, "cudaMalloc") && find(cuda.free_, "cudaFree") && find(cuda.get, "cudaGetDevice") &&
         find(cuda.set, "cudaSetDevice") && find(cuda.synchronize, "cudaDeviceSynchronize") &&
         find(cuda.last_error, "cudaGetLastError");
}

}  // namespace sn
