// A device beside the CPU, for tests where there is no GPU: memory of its own, streams that run late.
//
// Kernels are the CPU's. What differs is what a GPU punishes: an op on tensors of two devices is an
// error; memory that is given back is handed out again at once; and a copy on a side stream runs as
// late as its events allow, so whoever reads before he waited reads what was there before.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

// Counted for tests.
struct Counts {
    int64_t allocated = 0, peak = 0, to_host = 0, to_device = 0, scalars = 0, late = 0;
} counts;
bool run_late = true;

// ---- streams

struct Event {
    bool recorded = false, done = true;
    c10::StreamId stream = 0;
};

struct Task {
    std::function<void()> run;
    std::shared_ptr<Event> wait, record;
};

std::map<c10::StreamId, std::deque<Task>> queues;
c10::StreamId streams_made = 0;
thread_local c10::StreamId current = 0;

void run_until(const std::shared_ptr<Event>& event);

void run_first(c10::StreamId stream) {
    Task task = std::move(queues[stream].front());
    queues[stream].pop_front();
    if (task.wait) run_until(task.wait);
    if (task.run) task.run();
    if (task.record) task.record->done = true;
}

void run_all(c10::StreamId stream) {
    while (!queues[stream].empty()) run_first(stream);
}

void run_until(const std::shared_ptr<Event>& event) {
    while (!event->done && !queues[event->stream].empty()) run_first(event->stream);
}

// Work on the default stream is done when it is asked for; on others when somebody waits.
void enqueue(Task task) {
    auto& queue = queues[current];
    queue.push_back(std::move(task));
    if (current == 0 || !run_late) run_all(current);
}

// ---- memory

struct DeviceAllocator final : c10::Allocator {
    std::map<size_t, std::vector<void*>> free_blocks;

    static size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }

    // Functions as torch's CUDAPluggableAllocator takes them; null for memory of its own.
    void* (*pluggable_malloc)(ssize_t, int, void*) = nullptr;
    void (*pluggable_free)(void*, ssize_t, int, void*) = nullptr;
    std::map<void*, std::pair<size_t, void*>> plugged;  // bytes and stream

    c10::DataPtr allocate(size_t bytes) override {
        if (bytes == 0) return {nullptr, nullptr, &deleted, kDevice};
        const size_t size = rounded(bytes);
        void* block;
        if (pluggable_malloc) {
            void* stream = reinterpret_cast<void*>(current);
            block = pluggable_malloc(static_cast<ssize_t>(bytes), 0, stream);
            plugged[block] = {bytes, stream};
            std::memset(block, 0xff, bytes);
            counts.allocated += static_cast<int64_t>(size);
            counts.peak = std::max(counts.peak, counts.allocated);
            return {block, block, &deleted, kDevice};
        }
        auto& blocks = free_blocks[size];
        if (blocks.empty()) {
            block = std::malloc(size + 64);
            TORCH_CHECK(block, "stand-in device: out of memory");
            std::memcpy(block, &size, sizeof size);
        } else {
            // The one that was given back last, as on a GPU: who still writes to it is found out.
            block = blocks.back();
            blocks.pop_back();
        }
        void* data = static_cast<char*>(block) + 64;
        std::memset(data, 0xff, size);
        counts.allocated += static_cast<int64_t>(size);
        counts.peak = std::max(counts.peak, counts.allocated);
        return {data, block, &deleted, kDevice};
    }

    static void deleted(void* block);
    c10::DeleterFnPtr raw_deleter() const override { return &deleted; }
    void copy_data(void* to, const void* from, std::size_t count) const override {
        std::memcpy(to, from, count);
    }
};

DeviceAllocator device_memory;

void DeviceAllocator::deleted(void* block) {
    if (!block) return;
    auto found = device_memory.plugged.find(block);
    if (found != device_memory.plugged.end()) {
        auto [bytes, stream] = found->second;
        device_memory.plugged.erase(found);
        counts.allocated -= static_cast<int64_t>(rounded(bytes));
        std::memset(block, 0xff, bytes);
        device_memory.pluggable_free(block, static_cast<ssize_t>(bytes), 0, stream);
        return;
    }
    size_t size;
    std::memcpy(&size, block, sizeof size);
    counts.allocated -= static_cast<int64_t>(size);
    device_memory.free_blocks[size].push_back(block);
}

std::map<const char*, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        char* block = static_cast<char*>(std::malloc(std::max<size_t>(bytes, 1)));
        std::memset(block, 0xff, bytes);
        pinned[block] = std::max<size_t>(bytes, 1);
        return {block, block, &deleted, c10::Device(c10::DeviceType::CPU)};
    }
    static void deleted(void* block) {
        pinned.erase(static_cast<const char*>(block));
        std::free(block);
    }
    c10::DeleterFnPtr raw_deleter() const override { return &deleted; }
    void copy_data(void* to, const void* from, std::size_t count) const override {
        std::memcpy(to, from, count);
    }
} pinned_memory;

bool is_pinned(const void* data) {
    const char* at = static_cast<const char*>(data);
    auto it = pinned.upper_bound(at);
    if (it == pinned.begin()) return false;
    --it;
    return at < it->first + it->second;
}

// ---- what torch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kType; }
    c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
    c10::Device getDevice() const override { return kDevice; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device) const override { return stream(current); }
    c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return getNewStream(device, 0);
    }
    c10::Stream getNewStream(c10::Device, int) const override { return stream(++streams_made); }
    c10::Stream exchangeStream(c10::Stream next) const override {
        const auto before = current;
        current = next.id();
        return stream(before);
    }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }

    void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
        auto*& held = reinterpret_cast<std::shared_ptr<Event>*&>(*event);
        if (!held) held = new std::shared_ptr<Event>();
        // A new version: who waits for the one before goes on waiting for that.
        *held = std::make_shared<Event>();
        (*held)->recorded = true;
        (*held)->done = false;
        (*held)->stream = on.id();
        on_stream(on.id(), Task{nullptr, nullptr, *held});
    }
    void block(void* event, const c10::Stream& on) const override {
        if (event) on_stream(on.id(), Task{nullptr, held(event), nullptr});
    }
    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
        delete static_cast<std::shared_ptr<Event>*>(event);
    }
    bool queryEvent(void* event) const override { return !event || held(event)->done; }
    bool queryStream(const c10::Stream& it) const override { return queues[it.id()].empty(); }
    void synchronizeStream(const c10::Stream& it) const override { run_all(it.id()); }
    void synchronizeEvent(void* event) const override {
        if (event) run_until(held(event));
    }
    void synchronizeDevice(c10::DeviceIndex) const override {
        for (auto& [id, queue] : queues) run_all(id);
    }

    static c10::Stream stream(c10::StreamId id) {
        return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
    }
    static std::shared_ptr<Event> held(void* event) {
        return *static_cast<std::shared_ptr<Event>*>(event);
    }
    static void on_stream(c10::StreamId id, Task task) {
        const auto before = current;
        current = id;
        enqueue(std::move(task));
        current = before;
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- random numbers

// Numbers of the CPU's kernels, in a state of the device's own.
struct Chance final : c10::GeneratorImpl {
    at::Generator inner;

    explicit Chance(at::Generator inner)
        : c10::GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(inner)) {}
    void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
    void set_offset(uint64_t) override { TORCH_CHECK(false, "stand-in device: no offsets"); }
    uint64_t get_offset() const override { return 0; }
    uint64_t current_seed() const override { return inner.current_seed(); }
    uint64_t seed() override { return inner.seed(); }
    void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return inner.unsafeGetGeneratorImpl()->get_state();
    }
    Chance* clone_impl() const override { return new Chance(inner.clone()); }
};

at::Generator& chance() {
    static at::Generator made = at::make_generator<Chance>(at::detail::createCPUGenerator());
    return made;
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return chance(); }
    at::Generator getNewGenerator(c10::DeviceIndex) const override {
        return at::make_generator<Chance>(at::detail::createCPUGenerator());
    }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
        c10::DataPtr made = device_memory.allocate(bytes);
        std::memcpy(made.get(), storage.data(), std::min(bytes, storage.nbytes()));
        storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
        storage.unsafeGetStorageImpl()->set_nbytes(bytes);
    }
};

// ---- operators

bool on_device(const at::Tensor& it) { return it.device().type() == kType; }

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout>, std::optional<at::Device>,
                               std::optional<bool>, std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(size, stride, &device_memory,
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU; the device's keeps it.
at::Tensor as_host(const at::Tensor& it) {
    if (!on_device(it)) return it;
    return at::from_blob(it.data_ptr(), it.sizes(), it.strides(), it.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
    if (on_device(self) != on_device(to)) (on_device(self) ? counts.to_host : counts.to_device) += 1;
    at::Tensor from_view = as_host(self), to_view = as_host(to);
    auto run = [from_view, to_view]() mutable { to_view.copy_(from_view); };
    const bool late = current != 0 && non_blocking &&
        (on_device(self) || is_pinned(self.data_ptr())) && (on_device(to) || is_pinned(to.data_ptr()));
    counts.late += late;
    enqueue(Task{run, nullptr, nullptr});
    if (!late) run_all(current);
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
    if (to.sizes() != self.sizes()) to.resize_(self.sizes());
    return copy_from(self, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(size);
    const size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
    if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
    if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
    return self;
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
    return at::cpu::as_strided_symint(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::cpu::view_symint(self, size); }
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::cpu::_reshape_alias_symint(self, size, stride);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage from, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
    return at::cpu::set__symint(self, from, offset, size, stride);
}
at::Tensor& set_source(at::Tensor& self, at::Storage from) {
    const int64_t size = static_cast<int64_t>(from.nbytes() / self.dtype().itemsize());
    return at::cpu::set_(self, from, 0, {size}, {});
}

at::Scalar local_scalar(const at::Tensor& self) {
    counts.scalars += 1;
    return as_host(self).item();
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                       bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
    auto bias = b && b->defined() ? std::optional<at::Tensor>(as_host(*b)) : std::nullopt;
    return at::convolution(as_host(x), as_host(w), bias, stride, padding, dilation, transposed, output_padding,
                           groups).to(kDevice);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& g, const at::Tensor& x, const at::Tensor& w, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
    auto [a, b, c] = at::convolution_backward(as_host(g), as_host(x), as_host(w), std::nullopt, stride, padding,
                                              dilation, transposed, output_padding, groups, mask);
    auto there = [](const at::Tensor& it) { return it.defined() ? it.to(kDevice) : it; };
    return {there(a), there(b), there(c)};
}

// A tensor with dimensions beside those of the device, as a GPU refuses it.
void check_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    bool here = false, there = false;
    auto look = [&](const at::Tensor& it) {
        if (!it.defined()) return;
        if (on_device(it)) here = true;
        else if (it.dim() > 0) there = true;
    };
    for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
        if (value.isTensor()) look(value.toTensor());
        else if (value.isTensorList())
            for (const at::Tensor& it : value.toTensorVector()) look(it);
        else if (value.isOptionalTensorList())
            for (const auto& it : value.toOptionalTensorVector())
                if (it) look(*it);
    }
    // Indices may lie on the host.
    TORCH_CHECK(!(here && there) || op.schema().name().find("index") != std::string::npos,
                "expected all tensors to be on one device, ", op.schema().name(), " got two");
}

// The CPU's kernels draw from the device's state. Returns whether the op takes a generator.
bool hand_chance(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& arguments = op.schema().arguments();
    bool takes = false;
    for (size_t at = 0; at < arguments.size(); ++at) {
        const auto type = arguments[at].type();
        const auto optional = type->cast<c10::OptionalType>();
        if ((optional ? optional->getElementType() : type)->kind() != c10::TypeKind::GeneratorType) continue;
        takes = true;
        c10::IValue& value = (*stack)[stack->size() - arguments.size() + at];
        at::Generator given = value.isNone() ? chance() : value.toGenerator();
        if (given.device().type() == kType) value = static_cast<Chance*>(given.unsafeGetGeneratorImpl())->inner;
    }
    return takes;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    check_devices(op, *stack);
    const bool draws = !hand_chance(op, stack) && op.hasTag(at::Tag::nondeterministic_seeded);
    run_all(current);
    const auto before = counts;
    const auto stream = current;
    current = 0;
    if (draws) {
        // As dropout, which knows the CPU's own generator alone.
        at::Generator host = at::detail::getDefaultCPUGenerator();
        const at::Tensor state = host.get_state();
        host.set_state(chance().get_state());
        at::native::cpu_fallback(op, stack, true);
        chance().set_state(host.get_state());
        host.set_state(state);
    } else {
        at::native::cpu_fallback(op, stack, true);
    }
    current = stream;
    counts.to_host = before.to_host;
    counts.to_device = before.to_device;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty_memory_format);
    m.impl("empty_strided", empty_strided);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("resize_", resize);
    m.impl("as_strided", as_strided);
    m.impl("view", view);
    m.impl("_reshape_alias", reshape_alias);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);
    m.impl("unfold", at::native::unfold);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Storage", set_source);
    m.impl("_local_scalar_dense", local_scalar);
    m.impl("convolution_overrideable", convolution);
    m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
}

TORCH_LIBRARY(mock_device, m) {
    m.def("allocated() -> int", []() { return counts.allocated; });
    m.def("peak() -> int", []() { return counts.peak; });
    m.def("reset_peak() -> ()", []() { counts.peak = counts.allocated; });
    m.def("late_copies() -> int", []() { return counts.late; });
    m.def("copies_to_host() -> int", []() { return counts.to_host; });
    m.def("copies_to_device() -> int", []() { return counts.to_device; });
    m.def("scalars() -> int", []() { return counts.scalars; });
    m.def("run_late(bool late) -> ()", [](bool late) { run_late = late; });
    m.def("seed(int seed) -> ()", [](int64_t seed) { chance().set_current_seed(static_cast<uint64_t>(seed)); });
    m.def("chance() -> Tensor", []() { return chance().get_state(); });
    m.def("set_chance(Tensor state) -> ()", [](const at::Tensor& state) { chance().set_state(state); });
    m.def("allocate_by(int malloc, int free) -> ()", [](int64_t by_malloc, int64_t by_free) {
        device_memory.pluggable_malloc = reinterpret_cast<void* (*)(ssize_t, int, void*)>(by_malloc);
        if (by_free) device_memory.pluggable_free = reinterpret_cast<void (*)(void*, ssize_t, int, void*)>(by_free);
    });
    m.def("start() -> ()", []() {
        c10::SetAllocator(kType, &device_memory);
        at::RegisterPrivateUse1HooksInterface(new Hooks());
    });
}
