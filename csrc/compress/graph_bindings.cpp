// The FFT codec as two TensorFlow graph operations on the CPU: no Python in a step.
//
// A custom operation is usually compiled against TensorFlow's C++ headers, for a single release.
// TensorFlow also has a plain C interface for this (tensorflow/c/kernels.h and ops.h); its
// functions are looked up by name in the library that is already loaded. So this is compiled
// without TensorFlow, and if a function is missing, nothing is registered.
//
//   SnCompressEncode   a gradient and its memory -> the payload, as from FFTCodec.encode, and the
//                      next memory
//   SnCompressDecode   the gathered payloads of all ranks -> the mean of one gradient
#include "bindings.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "crc32.h"
#include "record.h"

namespace {

constexpr int kFloat = 1, kDouble = 2, kInt32 = 3, kInvalidArgument = 3;  // TensorFlow's numbers
constexpr int64_t kHeadWords = 8, kFixedWords = 6;  // of a header; those equal in all payloads
constexpr const char* kAgain =
    "If it happens again, suspect memory or the network; do all ranks run the same version with "
    "the same settings?";

struct Status;
struct Tensor;
struct Construction;
struct Context;
struct ShapeContext;
struct ShapeHandle;
struct OpBuilder;
struct KernelBuilder;

// The TensorFlow functions used: return type, name without TF_, parameters.
#define SN_TENSORFLOW(F)                                                                            \
  F(Status*, NewStatus, ())                                                                         \
  F(void, DeleteStatus, (Status*))                                                                  \
  F(int, GetCode, (const Status*))                                                                  \
  F(const char*, Message, (const Status*))                                                          \
  F(void, SetStatus, (Status*, int, const char*))                                                   \
  F(OpBuilder*, NewOpDefinitionBuilder, (const char*))                                              \
  F(void, OpDefinitionBuilderAddAttr, (OpBuilder*, const char*))                                    \
  F(void, OpDefinitionBuilderAddInput, (OpBuilder*, const char*))                                   \
  F(void, OpDefinitionBuilderAddOutput, (OpBuilder*, const char*))                                  \
  F(void, OpDefinitionBuilderSetShapeInferenceFunction,                                             \
    (OpBuilder*, void (*)(ShapeContext*, Status*)))                                                 \
  F(void, RegisterOpDefinition, (OpBuilder*, Status*))                                              \
  F(KernelBuilder*, NewKernelBuilder,                                                               \
    (const char*, const char*, void* (*)(Construction*), void (*)(void*, Context*),                 \
     void (*)(void*)))                                                                              \
  F(void, RegisterKernelBuilder, (const char*, KernelBuilder*, Status*))                            \
  F(void, OpKernelConstruction_GetAttrSize,                                                         \
    (Construction*, const char*, int32_t*, int32_t*, Status*))                                      \
  F(void, OpKernelConstruction_GetAttrInt64List,                                                    \
    (Construction*, const char*, int64_t*, int, Status*))                                           \
  F(void, OpKernelConstruction_GetAttrFloat, (Construction*, const char*, float*, Status*))         \
  F(void, OpKernelConstruction_Failure, (Construction*, Status*))                                   \
  F(void, OpKernelContext_Failure, (Context*, Status*))                                             \
  F(void, GetInput, (Context*, int, Tensor**, Status*))                                             \
  F(Tensor*, AllocateOutput, (Context*, int, int, const int64_t*, int, size_t, Status*))            \
  F(void*, TensorData, (const Tensor*))                                                             \
  F(size_t, TensorByteSize, (const Tensor*))                                                        \
  F(void, DeleteTensor, (Tensor*))                                                                  \
  F(void, ShapeInferenceContextSetUnknownShape, (ShapeContext*, Status*))

#define SN_POINTER(type, name, arguments) type(*name) arguments;
struct Api {
  SN_TENSORFLOW(SN_POINTER)
};
Api api;

// Looks them all up in the library; returns the name of the first that is missing, or null.
const char* find_all(void* library) {
  const char* missing = nullptr;
  const auto find = [&](const char* name, auto& function) {
    void* symbol = dlsym(library, name);
    if (!symbol && !missing) missing = name;
    std::memcpy(&function, &symbol, sizeof(symbol));
  };
#define SN_FIND(type, name, arguments) find("TF_" #name, api.name);
  SN_TENSORFLOW(SN_FIND)
  return missing;
}

// A TensorFlow status, deleted by the destructor.
class Outcome {
 public:
  Outcome() : status_(api.NewStatus()) {}
  ~Outcome() { api.DeleteStatus(status_); }
  Outcome(const Outcome&) = delete;
  Outcome& operator=(const Outcome&) = delete;
  operator Status*() const { return status_; }
  bool ok() const { return api.GetCode(status_) == 0; }
  const char* message() const { return api.Message(status_); }

 private:
  Status* status_;
};

void fail(Context* context, const std::string& message) {
  const Outcome outcome;
  api.SetStatus(outcome, kInvalidArgument, message.c_str());
  api.OpKernelContext_Failure(context, outcome);
}

// A tensor of a step, deleted by the destructor; null if TensorFlow returns none.
class Held {
 public:
  Held() = default;
  explicit Held(Tensor* tensor) : tensor_(tensor) {}
  Held(Held&& other) noexcept : tensor_(other.tensor_) { other.tensor_ = nullptr; }
  Held& operator=(Held&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    return *this;
  }
  ~Held() {
    if (tensor_) api.DeleteTensor(tensor_);
  }
  static Held input(Context* context, int at) {
    const Outcome outcome;
    Tensor* tensor = nullptr;
    api.GetInput(context, at, &tensor, outcome);
    return Held(outcome.ok() ? tensor : nullptr);
  }
  template <typename T>
  static Held output(Context* context, int at, int type, const int64_t* dims, int rank) {
    const Outcome outcome;
    size_t bytes = sizeof(T);
    for (int i = 0; i < rank; ++i) bytes *= static_cast<size_t>(dims[i]);
    Tensor* tensor = api.AllocateOutput(context, at, type, dims, rank, bytes, outcome);
    return Held(outcome.ok() ? tensor : nullptr);
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(api.TensorData(tensor_));
  }
  explicit operator bool() const { return tensor_ != nullptr; }
  int64_t words() const { return static_cast<int64_t>(api.TensorByteSize(tensor_) / 4); }

 private:
  Tensor* tensor_ = nullptr;
};

// A run of equal blocks of a vector; see codecs/fft_settings.py.
struct Section {
  int64_t start, stop, count, words_at, span;
  sn::Layout layout;

  int64_t padded() const { return count * layout.block; }
};

constexpr size_t kNumbers = 13;  // per section

// The settings of both operations, from their attributes.
struct Settings {
  std::vector<Section> sections;
  std::vector<uint32_t> header;
  int64_t n = 0, words = 0, top = -1, ranks = 0, stride = 0, at = 0;
  float decay = 1;
};

std::vector<int64_t> numbers(Construction* construction, const char* name, Status* status) {
  int32_t count = 0, unused = 0;
  api.OpKernelConstruction_GetAttrSize(construction, name, &count, &unused, status);
  std::vector<int64_t> values(static_cast<size_t>(count > 0 ? count : 0));
  if (api.GetCode(status) == 0)
    api.OpKernelConstruction_GetAttrInt64List(construction, name, values.data(),
                                              static_cast<int>(values.size()), status);
  return values;
}

// Null, with the failure reported, if an attribute is missing.
void* create(Construction* construction) {
  const Outcome outcome;
  auto settings = std::make_unique<Settings>();
  const std::vector<int64_t> layouts = numbers(construction, "layouts", outcome);
  const std::vector<int64_t> header = outcome.ok() ? numbers(construction, "header", outcome) : layouts;
  const std::vector<int64_t> sizes = outcome.ok() ? numbers(construction, "sizes", outcome) : layouts;
  if (outcome.ok())
    api.OpKernelConstruction_GetAttrFloat(construction, "decay", &settings->decay, outcome);
  if (outcome.ok() && (layouts.size() % kNumbers || header.size() != kHeadWords ||
                       sizes.size() != 6))
    api.SetStatus(outcome, kInvalidArgument, "attributes of another version of sn_compress");
  if (!outcome.ok()) {
    api.OpKernelConstruction_Failure(construction, outcome);
    return nullptr;
  }
  for (size_t i = 0; i < layouts.size(); i += kNumbers) {
    const int64_t* own = &layouts[i];
    settings->sections.push_back({own[0], own[1], own[2], own[3], own[4],
                                  {own[5], own[6], own[7], own[8],
                                   static_cast<sn::Values>(own[9]), static_cast<int>(own[10]),
                                   static_cast<int>(own[11]), own[12] != 0}});
  }
  for (const int64_t word : header) settings->header.push_back(static_cast<uint32_t>(word));
  settings->n = sizes[0];
  settings->words = sizes[1];
  settings->top = sizes[2];
  settings->ranks = sizes[3];
  settings->stride = sizes[4];
  settings->at = sizes[5];
  return settings.release();
}

void destroy(void* settings) { delete static_cast<Settings*>(settings); }

// Inputs: the gradient; the roots of each section; the memory of each, if there is one.
void encode(void* set, Context* context) {
  const auto& settings = *static_cast<const Settings*>(set);
  const int sections = static_cast<int>(settings.sections.size());
  const Held values = Held::input(context, 0);
  if (!values || values.words() != settings.n)
    return fail(context, "a gradient of another size than the graph was traced for");
  const int64_t words[] = {settings.words}, three[] = {3};
  const Held payload = Held::output<uint32_t>(context, 0, kInt32, words, 1);
  const Held told = Held::output<double>(context, 1, kDouble, three, 1);
  if (!payload || !told) return fail(context, "no memory for a payload");
  auto* const out = payload.as<uint32_t>();
  std::memset(out, 0, static_cast<size_t>(settings.words) * 4);
  std::memcpy(out, settings.header.data(), kHeadWords * 4);
  double energy = 0, error = 0, saturated = 0;
  for (int at = 0; at < sections; ++at) {
    const Section& section = settings.sections[static_cast<size_t>(at)];
    const Held roots = Held::input(context, 1 + at);
    const Held memory = Held::input(context, 1 + sections + at);  // null if there is none
    const int64_t dims[] = {section.count, section.layout.floats()};
    if (!roots) return fail(context, "no roots");
    Held left;
    if (memory) {
      if (memory.words() != dims[0] * dims[1])
        return fail(context, "a memory of another size than the graph was traced for");
      left = Held::output<float>(context, 2 + at, kFloat, dims, 2);
      if (!left) return fail(context, "no memory for what is not sent");
      std::memcpy(left.as<float>(), memory.as<float>(), static_cast<size_t>(dims[0] * dims[1]) * 4);
    }
    const float* blocks = values.as<const float>() + section.start;
    std::vector<float> padded;
    if (section.stop - section.start < section.padded()) {
      padded.resize(static_cast<size_t>(section.padded()));
      std::memcpy(padded.data(), blocks, static_cast<size_t>(section.stop - section.start) * 4);
      blocks = padded.data();
    }
    const sn::Tally tally = sn::encode_blocks(
        blocks, left ? left.as<float>() : nullptr, out + kHeadWords + section.words_at,
        section.count, section.layout, settings.decay, settings.top, section.span,
        roots.as<const float>());
    energy += tally.energy;
    error += tally.error;
    saturated += static_cast<double>(tally.saturated);
  }
  out[kFixedWords] = saturated < 4294967295.0 ? static_cast<uint32_t>(saturated) : 0xFFFFFFFFu;
  out[kHeadWords - 1] = sn::crc32(out, static_cast<size_t>(settings.words) * 4);
  auto* const tallies = told.as<double>();
  tallies[0] = energy;
  tallies[1] = error;
  tallies[2] = saturated;
}

// A description of what is wrong with a payload, or "".
std::string damage(const uint32_t* payload, const Settings& settings) {
  if (std::memcmp(payload, settings.header.data(), kFixedWords * 4) != 0)
    return "its header is another than expected";
  // The checksum's own word counts as zero.
  const uint32_t expected = payload[kHeadWords - 1], zero = 0;
  uint32_t checksum = sn::crc32(payload, 4 * (kHeadWords - 1));
  checksum = sn::crc32_on(checksum, &zero, 4);
  checksum = sn::crc32_on(checksum, payload + kHeadWords,
                          static_cast<size_t>(settings.words - kHeadWords) * 4);
  if (checksum == expected) return "";
  char text[100];
  std::snprintf(text, sizeof(text), "checksum is 0x%08x, header says 0x%08x: damaged on the way",
                checksum, expected);
  return text;
}

// Inputs: the gathered words of all ranks; the roots of each section.
void decode(void* set, Context* context) {
  const auto& settings = *static_cast<const Settings*>(set);
  const Held gathered = Held::input(context, 0);
  if (!gathered || gathered.words() != settings.ranks * settings.stride)
    return fail(context, "PayloadError: gathered " +
                             std::to_string(gathered ? gathered.words() : 0) + " words from " +
                             std::to_string(settings.ranks) + " ranks; expected " +
                             std::to_string(settings.stride) + " from each. Do all ranks run the "
                             "same version with the same settings?");
  std::vector<const uint32_t*> payloads;
  for (int64_t rank = 0; rank < settings.ranks; ++rank) {
    payloads.push_back(gathered.as<const uint32_t>() + rank * settings.stride + settings.at);
    const std::string wrong = damage(payloads.back(), settings);
    if (!wrong.empty())
      return fail(context, "PayloadError: from rank " + std::to_string(rank) + ": " + wrong + ". " +
                               kAgain);
  }
  const int64_t size[] = {settings.n};
  const Held mean = Held::output<float>(context, 0, kFloat, size, 1);
  if (!mean) return fail(context, "no memory for a mean");
  for (size_t at = 0; at < settings.sections.size(); ++at) {
    const Section& section = settings.sections[at];
    const Held roots = Held::input(context, 1 + static_cast<int>(at));
    if (!roots) return fail(context, "no roots");
    std::vector<const uint32_t*> records;
    for (const uint32_t* payload : payloads)
      records.push_back(payload + kHeadWords + section.words_at);
    float* const place = mean.as<float>() + section.start;
    std::vector<float> padded;
    const bool pads = section.stop - section.start < section.padded();
    if (pads) padded.resize(static_cast<size_t>(section.padded()));
    const int64_t row =
        sn::decode_blocks(records, pads ? padded.data() : place, section.count, section.layout,
                          1.0f / static_cast<float>(settings.ranks), section.span,
                          roots.as<const float>());
    if (row >= 0)
      return fail(context, "PayloadError: record " + std::to_string(row) + " is damaged. " + kAgain);
    if (pads)
      std::memcpy(place, padded.data(), static_cast<size_t>(section.stop - section.start) * 4);
  }
}

// Exceptions may not cross into TensorFlow.
template <void (*run)(void*, Context*)>
void guarded(void* settings, Context* context) {
  try {
    run(settings, context);
  } catch (const std::bad_alloc&) {
    fail(context, "no memory for a step of FFTCompression");
  }
}

void no_shape(ShapeContext* context, Status* status) {
  api.ShapeInferenceContextSetUnknownShape(context, status);
}

std::string define(const char* name, const std::vector<const char*>& counts,
                   const std::vector<const char*>& inputs,
                   const std::vector<const char*>& outputs, void (*run)(void*, Context*)) {
  OpBuilder* const op = api.NewOpDefinitionBuilder(name);
  for (const char* count : counts) api.OpDefinitionBuilderAddAttr(op, count);
  for (const char* attribute :
       {"layouts: list(int)", "header: list(int)", "sizes: list(int)", "decay: float"})
    api.OpDefinitionBuilderAddAttr(op, attribute);
  for (const char* input : inputs) api.OpDefinitionBuilderAddInput(op, input);
  for (const char* output : outputs) api.OpDefinitionBuilderAddOutput(op, output);
  api.OpDefinitionBuilderSetShapeInferenceFunction(op, no_shape);
  const Outcome outcome;
  api.RegisterOpDefinition(op, outcome);
  if (outcome.ok())
    api.RegisterKernelBuilder(name, api.NewKernelBuilder(name, "CPU", create, run, destroy),
                              outcome);
  return outcome.ok() ? "" : outcome.message();
}

// register_graph_kernels(path of libtensorflow_framework): the reason for failure, or None.
PyObject* register_graph_kernels(PyObject*, PyObject* args) {
  const char* path;
  if (!PyArg_ParseTuple(args, "s", &path)) return nullptr;
  void* const library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (!library) return PyUnicode_FromFormat("%s is not loaded", path);
  if (const char* missing = find_all(library)) return PyUnicode_FromFormat("no %s", missing);
  std::string wrong =
      define("SnCompressEncode", {"S: int >= 1", "M: int >= 0"},
             {"values: float", "roots: S * float", "memories: M * float"},
             {"payload: int32", "told: double", "left: M * float"}, guarded<encode>);
  if (wrong.empty())
    wrong = define("SnCompressDecode", {"S: int >= 1"}, {"gathered: int32", "roots: S * float"},
                   {"mean: float"}, guarded<decode>);
  if (!wrong.empty()) return PyUnicode_FromString(wrong.c_str());
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef sn::graph_methods[] = {
    {"register_graph_kernels", register_graph_kernels, METH_VARARGS,
     "See sn_compress.tensorflow.namespace."},
    {nullptr, nullptr, 0, nullptr}};
