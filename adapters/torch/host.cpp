// Eager calls of PyTorch tensors that are like calls before them, without Python: what cunorm.adapters.torch.host
// builds, if a user wants it to.
//
// A call's kind is all that its preparation depended on: the op, what PyTorch would do with the tensors (their dispatch
// keys and the thread's), their dtypes, devices, sizes, strides and alignments. Python meets each kind first: it checks
// the arguments, plans, compiles, and teaches what came of it. Of a kind that was taught, a call takes its tensors'
// addresses, allocates the results, launches, and is recorded by autograd; of any other nothing happens here, and
// Python goes on as if there were no such file.
#include "../launches.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <vector>

namespace {

using cunorm::Kind, cunorm::KindHash, cunorm::Launch, cunorm::LaunchKernel, cunorm::MOST_KNOWN;

// ---- What is taught.

// The driver's cuLaunchKernelEx and cuCtxGetCurrent.
using GetContext = int (*)(void** context);
LaunchKernel launch_kernel = nullptr;
GetContext get_context = nullptr;

struct Output {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  at::ScalarType dtype;
};

struct Ready {
  std::vector<std::optional<Output>> outputs;
  std::int64_t workspace_bytes;
  std::vector<std::int64_t> scratch_offsets;  // in the workspace; behind the call's pointers
  std::vector<Launch> launches;
  std::uintptr_t context;    // that the kernels were loaded into
  std::int64_t pair_offset;  // where mean and rstd are one tensor: bytes between them; else -1
  bool updates_running;
  pybind11::object call;  // which keeps the kernels loaded; let go of where the GIL is held, as all of this is
};

// Read and written where the GIL is held. A call goes on with what it found, also when another thread forgets. These
// are never let go of, since the interpreter may end before what would do so.
using Known = std::unordered_map<Kind, std::shared_ptr<const Ready>, KindHash>;
Known& known = *new Known;
std::int64_t generation = 0;          // how often everything was forgotten
PyObject* stream_of = nullptr;        // torch._C._cuda_getCurrentRawStream
PyObject* python_backward = nullptr;  // what computes gradients of a kind that nobody taught

void forget() {
  ++generation;
  Known forgotten;  // letting go of calls may run Python, which may come back here
  known.swap(forgotten);
}

// ---- Kinds.

// Statistics that a call returns or keeps: none; mean and rstd; or both in one tensor of two rows.
enum Statistics : int { NONE, APART, PAIRED };

using Tensors = std::array<at::Tensor, 7>;

// Whether a tensor carries a derivative of forward mode.
bool has_tangent(const at::Tensor& tensor) { return tensor.defined() && tensor._fw_grad(0).defined(); }

// Adds a tensor. False for one that is not just memory, or whose sizes cannot be asked for.
bool add_to(Kind& kind, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    kind.push_back(-1);
    return true;
  }
  const at::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (tensor.is_nested() || impl->layout() != at::kStrided || impl->has_symbolic_sizes_strides()) return false;
  if (!impl->has_storage()) return false;
  std::uintptr_t address = 0;
  try {
    address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  } catch (const c10::Error&) {
    return false;
  }
  if (address == 0 && tensor.numel() > 0) return false;
  const at::Device device = tensor.device();
  kind.push_back(static_cast<std::int64_t>(tensor.key_set().raw_repr()));
  kind.push_back(static_cast<std::int64_t>(tensor.scalar_type()) | static_cast<std::int64_t>(device.type()) << 8 |
                 static_cast<std::int64_t>(device.index() + 1) << 16 | static_cast<std::int64_t>(address % 16) << 32 |
                 tensor.dim() << 40);
  kind.insert(kind.end(), tensor.sizes().begin(), tensor.sizes().end());
  kind.insert(kind.end(), tensor.strides().begin(), tensor.strides().end());
  return true;
}

// None for tensors of which there can be no kind.
std::optional<Kind> kind_of(PyObject* op, std::int64_t options, const Tensors& tensors) {
  c10::impl::LocalDispatchKeySet of_thread = c10::impl::tls_local_dispatch_key_set();
  Kind kind;
  kind.reserve(64);
  kind.push_back(reinterpret_cast<std::intptr_t>(op));
  kind.push_back(options);
  kind.push_back(static_cast<std::int64_t>(of_thread.included_.raw_repr()));
  kind.push_back(static_cast<std::int64_t>(of_thread.excluded_.raw_repr()));
  for (const at::Tensor& tensor : tensors) {
    if (!add_to(kind, tensor)) return std::nullopt;
  }
  return kind;
}

std::int64_t forward_options(Statistics statistics) { return statistics; }

std::int64_t backward_options(const std::array<bool, 3>& mask, std::optional<at::ScalarType> bias_dtype, bool paired) {
  const int bias = bias_dtype ? static_cast<int>(*bias_dtype) + 1 : 0;
  return 1 << 16 | mask[0] << 8 | mask[1] << 9 | mask[2] << 10 | paired << 11 | bias;
}

// What was taught of a kind; and what a caller in Python is told where nothing can be run: None if Python may teach the
// kind, False if it is to go on without: for a kind that launches nothing, as those of the CPU, and where the thread's
// current context is not the one that the kernels are in.
struct Found {
  std::shared_ptr<const Ready> ready;
  PyObject* otherwise;
};

Found find(const std::optional<Kind>& kind) {
  if (!kind) return {nullptr, Py_False};
  const auto found = known.find(*kind);
  if (found == known.end()) return {nullptr, Py_None};
  if (!found->second) return {nullptr, Py_False};
  void* context = nullptr;
  if (get_context(&context) != 0 || reinterpret_cast<std::uintptr_t>(context) != found->second->context) {
    return {nullptr, Py_False};
  }
  return {found->second, nullptr};
}

// ---- Running what is known.

using Pointers = std::vector<std::uint64_t>;

std::uint64_t address_of(const at::Tensor& tensor) {
  return tensor.defined() ? reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) : 0;
}

at::Tensor allocated(const std::optional<Output>& output, at::Device device) {
  if (!output) return {};
  return at::empty_strided(output->sizes, output->strides, at::TensorOptions(output->dtype).device(device));
}

// The raw handle of the current stream. The GIL is held.
void* current_stream(at::Device device) {
  if (!device.is_cuda()) return nullptr;
  const auto index = pybind11::reinterpret_steal<pybind11::object>(PyLong_FromLong(device.index()));
  const auto stream = pybind11::reinterpret_steal<pybind11::object>(PyObject_CallOneArg(stream_of, index.ptr()));
  if (!stream) throw pybind11::error_already_set();
  return PyLong_AsVoidPtr(stream.ptr());
}

void launch(const Ready& ready, Pointers& pointers, at::Device device, void* stream) {
  at::Tensor workspace;
  std::uint64_t begin = 0;
  if (ready.workspace_bytes > 0) {
    workspace = at::empty_strided({ready.workspace_bytes}, {1}, at::TensorOptions(at::kByte).device(device));
    begin = address_of(workspace);
  }
  // Launches name them even where they are empty.
  for (const std::int64_t offset : ready.scratch_offsets) pointers.push_back(begin + offset);
  for (const Launch& launch : ready.launches) {
    const int status = launch.start(launch_kernel, pointers, stream);
    TORCH_CHECK(status == 0, "kernel ", launch.kernel, " could not be launched: CUDA driver error ", status);
  }
}

// y, residual_out, mean, rstd; those that a call does not have are undefined. The tensors are those of forward().
std::array<at::Tensor, 4> run_forward(const Ready& ready, const Tensors& tensors) {
  const auto& [x, residual, weight, bias, out, running_mean, running_var] = tensors;
  const at::Device device = x.device();
  void* const stream = current_stream(device);
  std::array<at::Tensor, 4> results;
  {
    // A launch waits where the stream's queue is full, and what that waits for may need Python; so may an allocation.
    const pybind11::gil_scoped_release release;
    for (std::size_t i = 0; i < 4; ++i) results[i] = allocated(ready.outputs[i], device);
    Pointers pointers = {address_of(x), address_of(residual), address_of(weight), address_of(bias),
                         address_of(results[0])};
    if (running_mean.defined()) {
      for (const at::Tensor* const tensor : {&running_mean, &running_var}) {
        if (ready.updates_running) tensor->mutable_data_ptr();  // a lazy clone gets memory of its own
        pointers.push_back(address_of(*tensor));
      }
    }
    pointers.push_back(address_of(results[1]));
    pointers.push_back(address_of(results[2]));
    pointers.push_back(ready.pair_offset < 0 ? address_of(results[3]) : address_of(results[2]) + ready.pair_offset);
    launch(ready, pointers, device, stream);
  }
  if (ready.updates_running && running_mean.defined()) {
    for (const at::Tensor* const tensor : {&running_mean, &running_var}) {
      if (!tensor->is_inference()) tensor->unsafeGetTensorImpl()->bump_version();  // autograd may have saved it
    }
  }
  return results;
}

// dx, dweight, dbias. The tensors are those of backward().
std::array<at::Tensor, 3> run_backward(const Ready& ready, const Tensors& tensors) {
  const at::Device device = tensors[2].device();
  void* const stream = current_stream(device);
  std::array<at::Tensor, 3> results;
  const pybind11::gil_scoped_release release;
  Pointers pointers;
  for (const at::Tensor& tensor : tensors) pointers.push_back(address_of(tensor));
  if (ready.pair_offset >= 0) pointers.back() = address_of(tensors[5]) + ready.pair_offset;
  for (std::size_t i = 0; i < 3; ++i) {
    results[i] = allocated(ready.outputs[i], device);
    pointers.push_back(address_of(results[i]));
  }
  launch(ready, pointers, device, stream);
  return results;
}

// ---- Autograd.

// The gradients as Python computes them, which says what is wrong, and teaches the kind.
std::array<at::Tensor, 3> ask_python(PyObject* op, const Tensors& tensors, const std::array<bool, 3>& mask,
                                     std::optional<at::ScalarType> bias_dtype, bool paired) {
  const auto& [dy, dresidual_out, x, weight, bias, mean, rstd] = tensors;
  using pybind11::literals::operator""_a;
  const auto wanted = pybind11::make_tuple(mask[0], mask[1], mask[2]);
  const pybind11::object found = pybind11::handle(python_backward)(
      pybind11::handle(op), dy, dresidual_out, x, weight, bias, mean, rstd, "output_mask"_a = wanted,
      "bias_dtype"_a = bias_dtype, "paired"_a = paired);
  std::array<at::Tensor, 3> gradients;
  for (std::size_t i = 0; i < 3; ++i) {
    const pybind11::object item = found[pybind11::int_(i)];
    if (!item.is_none()) gradients[i] = THPVariable_Unpack(item.ptr());
  }
  return gradients;
}

// PyTorch counts the references to a node in one of two ways, by its version. Its deleteNode, which only versions of
// the second way have, takes down long graphs without recursion.
template <typename T>
auto new_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>) {
    return c10::make_intrusive<T>();
  } else {
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  }
}

// The node of any op in autograd's graph: of the gradients of y and residual_out those of x, residual, weight and bias.
struct CunormBackward : torch::autograd::Node {
  PyObject* op = nullptr;  // which is one of cunorm.op_names.OPS, and so lives as long as the process
  bool paired = false;     // whether mean and rstd are one tensor, in mean's place
  std::optional<at::ScalarType> bias_dtype;
  std::array<torch::autograd::SavedVariable, 5> saved;  // x or residual_out, weight, bias, mean, rstd

  std::string name() const override { return "CunormBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (torch::autograd::SavedVariable& variable : saved) variable.reset_data();
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const at::Tensor dy = gradients[0], dresidual_out = gradients.size() > 1 ? gradients[1] : at::Tensor();
    const bool needs_x = task_should_compute_output(0), needs_residual = task_should_compute_output(1);
    const std::array<bool, 3> mask = {needs_x || needs_residual, task_should_compute_output(2),
                                      task_should_compute_output(3)};
    std::array<at::Tensor, 3> found = {dresidual_out, {}, {}};
    if (dy.defined()) {
      Tensors tensors = {dy, dresidual_out};
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (std::size_t i = 0; i < saved.size(); ++i) tensors[2 + i] = saved[i].unpack(getptr());
      }
      const pybind11::gil_scoped_acquire acquire;
      Found of_kind = {};
      // Only Python can record, or refuse, what is computed of gradients, and refuse forward mode.
      if (!at::GradMode::is_enabled() && std::none_of(tensors.begin(), tensors.end(), has_tangent)) {
        of_kind = find(kind_of(op, backward_options(mask, bias_dtype, paired), tensors));
      }
      found = of_kind.ready ? run_backward(*of_kind.ready, tensors) : ask_python(op, tensors, mask, bias_dtype, paired);
    }
    const auto& [dx, dweight, dbias] = found;
    return {needs_x ? dx : at::Tensor(), needs_residual ? dx : at::Tensor(), dweight, dbias};
  }
};

bool any_requires_grad(const Tensors& tensors, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) {
    if (tensors[i].defined() && tensors[i].requires_grad()) return true;
  }
  return false;
}

// The results of run_forward(), recorded. Statistics are constants to autograd.
std::array<at::Tensor, 4> recorded_forward(PyObject* op, bool keeps_bias, const Ready& ready, const Tensors& tensors) {
  const auto& [x, residual, weight, bias, out, running_mean, running_var] = tensors;
  const auto node = new_node<CunormBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, residual, weight, bias));
  std::array<at::Tensor, 4> results = run_forward(ready, tensors);
  const auto& [y, residual_out, mean, rstd] = results;
  torch::autograd::set_history(y, node);
  // Where weight and bias alone have gradients, the sum of x and residual is a constant.
  const bool differentiates_sum = residual.defined() && any_requires_grad(tensors, 0, 2);
  if (differentiates_sum) torch::autograd::set_history(residual_out, node);
  node->op = op;
  node->paired = ready.pair_offset >= 0;
  if (bias.defined()) node->bias_dtype = bias.scalar_type();
  using torch::autograd::SavedVariable;
  node->saved = {SavedVariable(residual.defined() ? residual_out : x, differentiates_sum),
                 SavedVariable(weight, false), SavedVariable(keeps_bias ? bias : at::Tensor(), false),
                 SavedVariable(mean, false), SavedVariable(rstd, false)};
  return results;
}

// ---- What Python calls.

// The tensors of a call; false where one is none, or of a subclass.
bool take(Tensors& tensors, PyObject* const* given, Py_ssize_t count) {
  TORCH_CHECK(count <= static_cast<Py_ssize_t>(tensors.size()), "too many arguments");
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (Py_IsNone(given[i])) continue;
    if (!THPVariable_CheckExact(given[i])) return false;
    tensors[i] = THPVariable_Unpack(given[i]);
  }
  return true;
}

template <std::size_t COUNT>
PyObject* as_tuple(const std::array<at::Tensor, COUNT>& tensors) {
  pybind11::tuple tuple(COUNT);
  for (std::size_t i = 0; i < COUNT; ++i) PyTuple_SET_ITEM(tuple.ptr(), i, THPVariable_Wrap(tensors[i]));
  return tuple.release().ptr();
}

// forward(op, keeps_bias, stats, x, residual, weight, bias, out[, running_mean, running_var]): y, residual_out, mean,
// rstd; else what `Found` says.
PyObject* forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 8 || count == 10, "forward takes 8 or 10 arguments");
  Tensors tensors;
  if (!take(tensors, arguments + 3, count - 3)) Py_RETURN_FALSE;
  if (tensors[4].defined() || any_requires_grad(tensors, 5, 7)) Py_RETURN_FALSE;
  const bool stats = arguments[2] == Py_True;
  const bool recorded = at::GradMode::is_enabled() && any_requires_grad(tensors, 0, 4);
  // As Python's _keeps_apart: what is saved where hooks look at it is what PyTorch's dispatcher would save.
  const bool apart = stats || (recorded && !at::SavedTensorDefaultHooks::get_tls_state().stack.empty());
  const Statistics statistics = apart ? APART : recorded ? PAIRED : NONE;
  const auto [ready, otherwise] = find(kind_of(arguments[0], forward_options(statistics), tensors));
  if (!ready) return Py_NewRef(otherwise);
  if (!recorded) return as_tuple(run_forward(*ready, tensors));
  std::array<at::Tensor, 4> results = recorded_forward(arguments[0], arguments[1] == Py_True, *ready, tensors);
  if (!stats) results[2] = results[3] = at::Tensor();
  return as_tuple(results);
  END_HANDLE_TH_ERRORS
}

std::array<bool, 3> mask_of(PyObject* mask) {
  TORCH_CHECK(PyTuple_Check(mask) && PyTuple_GET_SIZE(mask) == 3, "the mask is a tuple of three");
  const auto item = [&](int i) { return PyTuple_GET_ITEM(mask, i) == Py_True; };
  return {item(0), item(1), item(2)};
}

// backward(op, mask, bias_dtype, paired, dy, dresidual_out, x, weight, bias, mean, rstd): dx, dweight, dbias; else what
// `Found` says.
PyObject* backward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 11, "backward takes 11 arguments");
  Tensors tensors;
  if (!take(tensors, arguments + 4, count - 4)) Py_RETURN_FALSE;
  if (at::GradMode::is_enabled() && any_requires_grad(tensors, 0, 7)) Py_RETURN_FALSE;
  const auto bias_dtype = pybind11::handle(arguments[2]).cast<std::optional<at::ScalarType>>();
  const std::int64_t options = backward_options(mask_of(arguments[1]), bias_dtype, arguments[3] == Py_True);
  const auto [ready, otherwise] = find(kind_of(arguments[0], options, tensors));
  return ready ? as_tuple(run_backward(*ready, tensors)) : Py_NewRef(otherwise);
  END_HANDLE_TH_ERRORS
}

// What Python has prepared, in the order of cunorm.launch.Step and of `Ready`.
using GivenStep = std::tuple<std::string, std::uintptr_t, std::uint32_t, std::array<std::uint32_t, 2>, std::uint32_t,
                             std::vector<std::tuple<std::int32_t, std::uint32_t>>, std::string, std::vector<int>>;
using GivenOutput = std::optional<std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>, at::ScalarType>>;
using Given = std::tuple<std::vector<GivenOutput>, std::int64_t, std::vector<std::int64_t>, std::vector<GivenStep>,
                         std::uintptr_t, std::int64_t, bool, pybind11::object>;

Launch launch_of(const GivenStep& step) {
  const auto& [kernel, function, grid, block, shared_bytes, given, arguments, places] = step;
  return Launch::of(kernel, function, grid, block[0], block[1], shared_bytes, given, arguments, places);
}

Ready ready_of(const Given& given) {
  const auto& [outputs, workspace_bytes, scratch_offsets, steps, context, pair_offset, updates_running, call] = given;
  Ready ready = {{}, workspace_bytes, scratch_offsets, {}, context, pair_offset, updates_running, call};
  for (const GivenOutput& output : outputs) {
    ready.outputs.emplace_back();
    if (output) ready.outputs.back() = {std::get<0>(*output), std::get<1>(*output), std::get<2>(*output)};
  }
  for (const GivenStep& step : steps) ready.launches.push_back(launch_of(step));
  return ready;
}

// Nothing is given of a kind that launches nothing. Does nothing if everything was forgotten since the generation in
// which the preparation was found.
void teach(PyObject* op, std::int64_t options, const pybind11::tuple& given_tensors, const std::optional<Given>& given,
           std::int64_t begun) {
  Tensors tensors;
  if (!take(tensors, &PyTuple_GET_ITEM(given_tensors.ptr(), 0), PyTuple_GET_SIZE(given_tensors.ptr()))) return;
  std::optional<Kind> kind = kind_of(op, options, tensors);
  if (!kind || begun != generation) return;
  if (known.size() >= MOST_KNOWN) {
    Known forgotten;
    known.swap(forgotten);
  }
  known[std::move(*kind)] = given ? std::make_shared<const Ready>(ready_of(*given)) : nullptr;
}

PyMethodDef methods[] = {
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(forward)), METH_FASTCALL, nullptr},
    {"backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(backward)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PYBIND11_MODULE(cunorm_torch_host, module) {
  using pybind11::object, pybind11::tuple;
  PyModule_AddFunctions(module.ptr(), methods);
  module.def("begin", [](std::uintptr_t launch, std::uintptr_t context, object stream, object python) {
    launch_kernel = reinterpret_cast<LaunchKernel>(launch);
    get_context = reinterpret_cast<GetContext>(context);
    stream_of = stream.release().ptr();
    python_backward = python.release().ptr();
  });
  module.def("teach_forward",
             [](object op, int statistics, const tuple& tensors, const std::optional<Given>& ready,
                std::int64_t begun) {
               teach(op.ptr(), forward_options(static_cast<Statistics>(statistics)), tensors, ready, begun);
             });
  module.def("teach_backward", [](object op, std::array<bool, 3> mask, std::optional<at::ScalarType> bias_dtype,
                                  bool paired, const tuple& tensors, const std::optional<Given>& ready,
                                  std::int64_t begun) {
    teach(op.ptr(), backward_options(mask, bias_dtype, paired), tensors, ready, begun);
  });
  module.def("forget", forget);
  module.def("generation", [] { return generation; });
}
