// TensorFlow's op "Cunorm", which computes any of cunorm's ops: what cunorm.adapters.tensorflow.host builds, if a user
// wants it to.
//
// It launches on TensorFlow's own stream and allocates from TensorFlow's allocator, so that nothing waits for the GPU.
// What a call launches, Python plans when its kind is met first: the op's attributes, the device, and the dtypes, sizes
// and alignments of the inputs. Of a kind that is known, a call needs no Python; but on the CPU Python computes.
//
// Python is called through the functions that cunorm_begin was given. They are of ctypes, which takes the GIL for them.
#include "../launches.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "xla/stream_executor/stream.h"
#include "xla/stream_executor/stream_executor.h"

namespace {

using cunorm::Kind, cunorm::KindHash, cunorm::Launch, cunorm::LaunchKernel, cunorm::MOST_KNOWN;

// ---- What Python tells, by the functions at the end.

// Until Python says that it was none: it may be interrupted before it can say anything.
struct Failure {
  absl::StatusCode code = absl::StatusCode::kAborted;
  std::string message = "cunorm was interrupted, or Python has ended";

  absl::Status status() const { return absl::Status(code, message); }
};

// A prepared call. Its pointers are those of the inputs, of the outputs and of the scratch memory, in this order.
struct Ready {
  std::vector<std::pair<tensorflow::DataType, tensorflow::TensorShape>> outputs;
  std::int64_t workspace_bytes = 0;
  std::vector<std::int64_t> scratch_offsets;
  std::vector<Launch> launches;
  void* context = nullptr;    // that the kernels were loaded into
  bool runs_in_python = false;
  std::int64_t number = -1;   // Python's, for what keeps the kernels loaded
  Failure failure;

  ~Ready();
};

// An input, as Python reads it.
struct Given {
  const void* address;
  std::int32_t dtype;
  std::int32_t rank;
  const std::int64_t* sizes;
};

// ---- Python's functions, and the driver's.

void (*prepare)(Ready*, const char* what, std::int32_t device, std::int32_t count, const Given*) = nullptr;
void (*compute)(Failure*, std::int64_t number, const std::uint64_t* pointers) = nullptr;
void (*release)(std::int64_t number) = nullptr;
LaunchKernel launch_kernel = nullptr;

// Whoever calls Python once it is ending never returns, and those who wait for him do not either.
class Interpreter {
 public:
  bool enter() {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_ += has_ended_ ? 0 : 1;
    return !has_ended_;
  }
  void leave() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--calls_ == 0) idle_.notify_all();
  }
  // Waits for the calls that are under way.
  void end() {
    std::unique_lock<std::mutex> lock(mutex_);
    has_ended_ = true;
    idle_.wait(lock, [this] { return calls_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  int calls_ = 0;
  bool has_ended_ = false;
};
Interpreter& interpreter = *new Interpreter;

// Calls one of Python's functions, unless Python has ended.
template <typename... Parameters, typename... Values>
void call_python(void (*function)(Parameters...), Values... values) {
  if (!interpreter.enter()) return;
  function(values...);
  interpreter.leave();
}

int (*push_context)(void*) = nullptr;
int (*pop_context)(void**) = nullptr;

Ready::~Ready() {
  if (number >= 0) call_python(release, number);
}

// ---- Kinds that were met. They are never let go of, since the interpreter may end before what would do so.

using Known = std::unordered_map<Kind, std::shared_ptr<const Ready>, KindHash>;
std::mutex& mutex = *new std::mutex;
Known& known = *new Known;
auto& numbers = *new std::unordered_map<std::string, std::int64_t>;  // of the attributes "what"
std::int64_t generation = 0;                                         // how often everything was forgotten

std::int64_t number_of(const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex);
  return numbers.emplace(what, static_cast<std::int64_t>(numbers.size())).first->second;
}

std::int64_t current_generation() {
  const std::lock_guard<std::mutex> lock(mutex);
  return generation;
}

std::shared_ptr<const Ready> find(const Kind& kind) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(kind);
  return found == known.end() ? nullptr : found->second;
}

// Does nothing if everything was forgotten since the preparation began.
void remember(Kind kind, std::shared_ptr<const Ready> ready, std::int64_t begun) {
  Known forgotten;  // letting go of calls runs Python, which may wait for the lock
  const std::lock_guard<std::mutex> lock(mutex);
  if (begun != generation) return;
  if (known.size() >= MOST_KNOWN) known.swap(forgotten);
  known.emplace(std::move(kind), std::move(ready));
}

// ---- The op.

class Cunorm : public tensorflow::OpKernel {
 public:
  explicit Cunorm(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("what", &what_));
    number_ = number_of(what_);
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    tensorflow::DeviceContext* const device_context = context->op_device_context();
    stream_executor::Stream* const stream = device_context == nullptr ? nullptr : device_context->stream();
    const int device = stream == nullptr ? -1 : stream->parent()->device_ordinal();

    Kind kind = {number_, device};
    std::vector<std::uint64_t> pointers;
    for (int i = 0; i < context->num_inputs(); ++i) {
      const tensorflow::Tensor& input = context->input(i);
      const auto address = reinterpret_cast<std::uintptr_t>(input.data());
      pointers.push_back(address);
      kind.insert(kind.end(), {input.dtype(), static_cast<std::int64_t>(address % 16), input.dims()});
      for (const auto size : input.shape()) kind.push_back(size.size);
    }
    std::shared_ptr<const Ready> ready = find(kind);
    if (!ready) ready = prepared(context, std::move(kind), device);
    OP_REQUIRES_OK(context, ready->failure.status());
    OP_REQUIRES(context, static_cast<std::size_t>(context->num_outputs()) == ready->outputs.size(),
                absl::InternalError("cunorm's results are others than those that were declared"));

    for (std::size_t i = 0; i < ready->outputs.size(); ++i) {
      const auto& [dtype, shape] = ready->outputs[i];
      OP_REQUIRES(context, dtype == context->expected_output_dtype(i),
                  absl::InternalError("a result of cunorm has another dtype than was declared"));
      tensorflow::Tensor* output = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(i, shape, &output));
      pointers.push_back(reinterpret_cast<std::uintptr_t>(output->data()));
    }
    if (ready->runs_in_python) {
      Failure failure;
      call_python(compute, &failure, ready->number, pointers.data());
      OP_REQUIRES_OK(context, failure.status());
      return;
    }
    tensorflow::Tensor workspace;
    std::uintptr_t begin = 0;
    if (ready->workspace_bytes > 0) {
      const tensorflow::TensorShape shape({ready->workspace_bytes});
      OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_UINT8, shape, &workspace));
      begin = reinterpret_cast<std::uintptr_t>(workspace.data());
    }
    // Launches name them even where they are empty.
    for (const std::int64_t offset : ready->scratch_offsets) pointers.push_back(begin + offset);
    OP_REQUIRES_OK(context, launch(*ready, pointers, stream));
  }

 private:
  // What Python prepares, or why it cannot.
  std::shared_ptr<const Ready> prepared(tensorflow::OpKernelContext* context, Kind kind, int device) {
    const std::int64_t begun = current_generation();
    std::vector<std::vector<std::int64_t>> sizes;
    for (int i = 0; i < context->num_inputs(); ++i) {
      sizes.emplace_back();
      for (const auto size : context->input(i).shape()) sizes.back().push_back(size.size);
    }
    std::vector<Given> given;
    for (int i = 0; i < context->num_inputs(); ++i) {
      const tensorflow::Tensor& input = context->input(i);
      given.push_back({input.data(), input.dtype(), input.dims(), sizes[i].data()});
    }
    const auto ready = std::make_shared<Ready>();
    call_python(prepare, ready.get(), what_.c_str(), device, static_cast<std::int32_t>(given.size()), given.data());
    if (ready->failure.code == absl::StatusCode::kOk) remember(std::move(kind), ready, begun);
    return ready;
  }

  static absl::Status launch(const Ready& ready, const std::vector<std::uint64_t>& pointers,
                             stream_executor::Stream* stream) {
    void* const handle = stream == nullptr ? nullptr : stream->platform_specific_handle().stream;
    if (const int status = push_context(ready.context)) return failed("the kernels' context", status);
    absl::Status result;
    for (const Launch& launch : ready.launches) {
      if (const int status = launch.start(launch_kernel, pointers, handle)) {
        result = failed("kernel " + launch.kernel, status);
        break;
      }
    }
    void* popped = nullptr;
    pop_context(&popped);
    return result;
  }

  static absl::Status failed(const std::string& what, int status) {
    return absl::InternalError(what + " could not be launched: CUDA driver error " + std::to_string(status));
  }

  std::string what_;
  std::int64_t number_;
};

// The results' shapes are set by Python, which knows the op.
absl::Status any_shapes(tensorflow::shape_inference::InferenceContext* context) {
  for (int i = 0; i < context->num_outputs(); ++i) context->set_output(i, context->UnknownShape());
  return absl::OkStatus();
}

REGISTER_OP("Cunorm")
    .Input("given: given_types")
    .Output("results: result_types")
    .Attr("given_types: list({half, bfloat16, float, double}) >= 1")
    .Attr("result_types: list({half, bfloat16, float, double}) >= 1")
    .Attr("what: string")
    .SetShapeFn(any_shapes)
    .Doc("One of cunorm's ops: cunorm.adapters.tensorflow says which by `what`.");
REGISTER_KERNEL_BUILDER(Name("Cunorm").Device(tensorflow::DEVICE_CPU), Cunorm);
REGISTER_KERNEL_BUILDER(Name("Cunorm").Device(tensorflow::DEVICE_GPU), Cunorm);

}  // namespace

// ---- What Python calls.

#define CUNORM_EXPORT extern "C" __attribute__((visibility("default")))

CUNORM_EXPORT void cunorm_begin(decltype(prepare) to_prepare, decltype(compute) to_compute,
                                decltype(release) to_release) {
  prepare = to_prepare;
  compute = to_compute;
  release = to_release;
}

CUNORM_EXPORT void cunorm_end() { interpreter.end(); }

CUNORM_EXPORT void cunorm_use_driver(void* launch, void* push, void* pop) {
  launch_kernel = reinterpret_cast<LaunchKernel>(launch);
  push_context = reinterpret_cast<int (*)(void*)>(push);
  pop_context = reinterpret_cast<int (*)(void**)>(pop);
}

CUNORM_EXPORT void cunorm_forget() {
  Known forgotten;  // letting go of calls runs Python, which may wait for the lock
  const std::lock_guard<std::mutex> lock(mutex);
  ++generation;
  known.swap(forgotten);
}

// The code is one of absl::StatusCode.
CUNORM_EXPORT void cunorm_fail(Failure* failure, std::int32_t code, const char* message) {
  *failure = {static_cast<absl::StatusCode>(code), message};
}

CUNORM_EXPORT void cunorm_succeed(Failure* failure) { *failure = {absl::StatusCode::kOk, ""}; }

CUNORM_EXPORT void cunorm_succeed_ready(Ready* ready) { cunorm_succeed(&ready->failure); }

CUNORM_EXPORT void cunorm_fail_ready(Ready* ready, std::int32_t code, const char* message) {
  cunorm_fail(&ready->failure, code, message);
}

CUNORM_EXPORT void cunorm_add_output(Ready* ready, std::int32_t dtype, std::int32_t rank, const std::int64_t* sizes) {
  tensorflow::TensorShape shape;
  for (std::int32_t i = 0; i < rank; ++i) shape.AddDim(sizes[i]);
  ready->outputs.emplace_back(static_cast<tensorflow::DataType>(dtype), shape);
}

CUNORM_EXPORT void cunorm_run_in_python(Ready* ready, std::int64_t number) {
  ready->number = number;
  ready->runs_in_python = true;
}

CUNORM_EXPORT void cunorm_launch(Ready* ready, std::int64_t number, void* context, std::int64_t workspace_bytes,
                                 std::int32_t scratch_count, const std::int64_t* scratch_offsets) {
  ready->number = number;
  ready->context = context;
  ready->workspace_bytes = workspace_bytes;
  ready->scratch_offsets.assign(scratch_offsets, scratch_offsets + scratch_count);
}

// A cunorm.launch.Step. Attributes are pairs of an id and the value's first word.
CUNORM_EXPORT void cunorm_add_step(Ready* ready, const char* kernel, std::uint64_t function, std::uint32_t grid,
                                   std::uint32_t block_x, std::uint32_t block_y, std::uint32_t shared_bytes,
                                   std::int32_t attribute_count, const std::int32_t* attributes,
                                   std::int32_t argument_bytes, const char* arguments, std::int32_t place_count,
                                   const std::int32_t* places) {
  std::vector<std::pair<std::int32_t, std::uint32_t>> pairs;
  for (std::int32_t i = 0; i < attribute_count; ++i) pairs.emplace_back(attributes[2 * i], attributes[2 * i + 1]);
  ready->launches.push_back(Launch::of(kernel, function, grid, block_x, block_y, shared_bytes, pairs,
                                       std::string(arguments, argument_bytes),
                                       std::vector<int>(places, places + place_count)));
}
