// Calls of CuPy arrays that are like calls before them, with next to no Python: what cunorm.adapters.cupy.host builds,
// if a user wants it to.
//
// A call's kind is all that its preparation depended on: the op, and the arrays' dtypes, devices, shapes, strides and
// alignments. Python meets each kind first: it checks the arguments, plans, compiles, and teaches what came of it. Of a
// kind that was taught, a call reads its arrays' addresses, lets CuPy allocate the results, and launches; of any other
// nothing happens here, and Python goes on as if there were no such file.
//
// CuPy has no interface but Python's, so that this depends on no version of it. The GIL is held but for the launches.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../launches.h"

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using cunorm::Kind, cunorm::KindHash, cunorm::Launch, cunorm::LaunchKernel, cunorm::MOST_KNOWN;

// ---- Python's objects.

struct LetGo {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Object = std::unique_ptr<PyObject, LetGo>;  // a reference of ours

// An exception of Python's has been set.
struct Raised {};

Object checked(PyObject* object) {
  if (object == nullptr) throw Raised();
  return Object(object);
}

Object shared(PyObject* object) {
  Py_XINCREF(object);
  return Object(object);
}

Object attribute(PyObject* object, PyObject* name) { return checked(PyObject_GetAttr(object, name)); }

std::int64_t number(PyObject* object) {
  const std::int64_t found = PyLong_AsLongLong(object);
  if (found == -1 && PyErr_Occurred() != nullptr) throw Raised();
  return found;
}

std::uint64_t address(PyObject* object) {
  const std::uint64_t found = PyLong_AsUnsignedLongLong(object);
  if (PyErr_Occurred() != nullptr) throw Raised();
  return found;
}

// Calls a function of Python's, and raises in Python what was thrown.
template <typename Function>
PyObject* guarded(Function function) {
  try {
    return function();
  } catch (const Raised&) {
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// ---- What is taught.

struct Output {
  Object shape;
  Object dtype;
};

struct Ready {
  std::vector<Output> outputs;  // null for those that a call does not have
  Object workspace;             // what `allocate_workspace` makes; null for none
  std::vector<std::int64_t> scratch_offsets;  // in the workspace; behind the call's pointers
  std::vector<Launch> launches;               // none of a kind that Python is to run
  std::uintptr_t context;                     // that the kernels were loaded into
  Object device;
  Object call;                 // which keeps the kernels loaded
  std::vector<Object> dtypes;  // of the call's arrays: a kind has their addresses
};

// The driver's cuLaunchKernelEx and cuCtxGetCurrent.
using GetContext = int (*)(void** context);
LaunchKernel launch_kernel = nullptr;
GetContext get_context = nullptr;

// None of this is ever let go of, since the interpreter may end before what would do so.
using Known = std::unordered_map<Kind, std::shared_ptr<const Ready>, KindHash>;
Known& known = *new Known;
std::int64_t generation = 0;             // how often everything was forgotten
PyObject* array_type = nullptr;          // cupy.ndarray
PyObject* current_stream = nullptr;      // of a device: has a `ptr`
PyObject* allocate_workspace = nullptr;  // of what `Ready` has, and an array beside which it is to be
struct {
  PyObject *data, *ptr, *device_id, *shape, *strides, *dtype;
} names;

// A call goes on with what it found, also when another thread forgets.
void forget_all() {
  Known forgotten;  // letting go of calls may run Python, which may come back here
  known.swap(forgotten);
}

// ---- Kinds.

using Pointers = std::vector<std::uint64_t>;

void add_numbers(Kind& kind, PyObject* tuple) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) kind.push_back(number(PyTuple_GET_ITEM(tuple, i)));
}

std::uint64_t address_of(PyObject* array) {
  const Object memory = attribute(array, names.data);
  return address(attribute(memory.get(), names.ptr).get());
}

// The arrays of a call, each of which may be None.
struct Arrays {
  PyObject* const* given;
  Py_ssize_t count;
};

// False where one is no array, or of a subclass.
bool describe(const Arrays& arrays, Kind& kind, Pointers& pointers) {
  for (Py_ssize_t i = 0; i < arrays.count; ++i) {
    PyObject* const array = arrays.given[i];
    if (array == Py_None) {
      kind.push_back(-1);
      pointers.push_back(0);
      continue;
    }
    if (reinterpret_cast<PyObject*>(Py_TYPE(array)) != array_type) return false;
    const Object memory = attribute(array, names.data), shape = attribute(array, names.shape);
    pointers.push_back(address(attribute(memory.get(), names.ptr).get()));
    const std::int64_t device = number(attribute(memory.get(), names.device_id).get());
    const auto alignment = static_cast<std::int64_t>(pointers.back() % 16);
    kind.push_back(PyTuple_GET_SIZE(shape.get()) << 32 | device << 8 | alignment);
    kind.push_back(reinterpret_cast<std::intptr_t>(attribute(array, names.dtype).get()));
    add_numbers(kind, shape.get());
    add_numbers(kind, attribute(array, names.strides).get());
  }
  return true;
}

// What tells the calls of an op apart beside their arrays: whether statistics are returned; which gradients are.
std::int64_t forward_options(PyObject* stats) { return stats == Py_True; }

std::int64_t backward_options(PyObject* mask) {
  if (!PyTuple_Check(mask) || PyTuple_GET_SIZE(mask) != 3) {
    PyErr_SetString(PyExc_TypeError, "the mask is a tuple of three");
    throw Raised();
  }
  std::int64_t options = 8;
  for (int i = 0; i < 3; ++i) options |= static_cast<std::int64_t>(PyTuple_GET_ITEM(mask, i) == Py_True) << i;
  return options;
}

// What was taught of a kind, with the arrays' addresses; else what a caller in Python is told: None if Python may teach
// the kind, False if it is to go on without, for what launches nothing, and where the thread's current context is not
// the one that the kernels are in.
struct Found {
  std::shared_ptr<const Ready> ready;
  Pointers pointers;
  PyObject* otherwise;
};

Found find(PyObject* op, std::int64_t options, const Arrays& arrays) {
  Kind kind;
  Pointers pointers;
  kind.reserve(64);
  pointers.reserve(16);
  kind.push_back(reinterpret_cast<std::intptr_t>(op));  // which lives as long as the process
  kind.push_back(options);
  if (!describe(arrays, kind, pointers)) return {nullptr, {}, Py_False};
  const auto found = known.find(kind);
  if (found == known.end()) return {nullptr, {}, Py_None};
  if (found->second->launches.empty()) return {nullptr, {}, Py_False};
  void* context = nullptr;
  if (get_context(&context) != 0 || reinterpret_cast<std::uintptr_t>(context) != found->second->context) {
    return {nullptr, {}, Py_False};
  }
  return {found->second, std::move(pointers), nullptr};
}

// ---- Running what is known.

// A new array on the current device, which is the one of the current context; null for none.
Object allocated(const Output& output) {
  if (!output.shape) return nullptr;
  PyObject* const arguments[] = {output.shape.get(), output.dtype.get()};
  return checked(PyObject_Vectorcall(array_type, arguments, 2, nullptr));
}

void launch(const Ready& ready, Pointers& pointers, PyObject* x) {
  Object workspace;  // which may be used again as soon as the kernels are launched, since CuPy's memory goes by streams
  std::uint64_t begin = 0;
  if (ready.workspace) {
    PyObject* const arguments[] = {ready.workspace.get(), x};
    workspace = checked(PyObject_Vectorcall(allocate_workspace, arguments, 2, nullptr));
    begin = address_of(workspace.get());
  }
  // Launches name them even where they are empty.
  for (const std::int64_t offset : ready.scratch_offsets) pointers.push_back(begin + offset);
  const Object stream = checked(PyObject_CallOneArg(current_stream, ready.device.get()));
  void* const handle = reinterpret_cast<void*>(address(attribute(stream.get(), names.ptr).get()));
  int status = 0;
  const Launch* launched = nullptr;
  // A launch waits where the stream's queue is full, and what that waits for may be a host function in Python.
  Py_BEGIN_ALLOW_THREADS;
  for (const Launch& launch : ready.launches) {
    launched = &launch;
    if ((status = launch.start(launch_kernel, pointers, handle)) != 0) break;
  }
  Py_END_ALLOW_THREADS;
  if (status != 0) {
    PyErr_Format(PyExc_RuntimeError, "kernel %s could not be launched: CUDA driver error %d", launched->kernel.c_str(),
                 status);
    throw Raised();
  }
}

PyObject* as_tuple(std::vector<Object> results) {
  Object tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
  for (std::size_t i = 0; i < results.size(); ++i) {
    PyTuple_SET_ITEM(tuple.get(), i, results[i] ? results[i].release() : Py_NewRef(Py_None));
  }
  return tuple.release();
}

// forward(op, stats, x, residual, weight, bias, out[, running_mean, running_var]): y, residual_out, mean, rstd; else
// what `Found` says.
PyObject* forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 7 && count != 9) return PyErr_Format(PyExc_TypeError, "forward takes 7 or 9 arguments");
    const Arrays arrays = {arguments + 2, count - 2};
    auto [ready, pointers, otherwise] = find(arguments[0], forward_options(arguments[1]), arrays);
    if (!ready) return Py_NewRef(otherwise);
    std::vector<Object> results;
    for (const Output& output : ready->outputs) results.push_back(allocated(output));
    if (results[0]) {
      pointers[4] = address_of(results[0].get());  // the place of the out that was not given
    } else {
      results[0] = shared(arrays.given[4]);
    }
    for (std::size_t i = 1; i < results.size(); ++i) pointers.push_back(results[i] ? address_of(results[i].get()) : 0);
    launch(*ready, pointers, arrays.given[0]);
    return as_tuple(std::move(results));
  });
}

// backward(op, mask, dy, dresidual_out, x, weight, bias, mean, rstd): dx, dweight, dbias; else what `Found` says.
PyObject* backward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 9) return PyErr_Format(PyExc_TypeError, "backward takes 9 arguments");
    const Arrays arrays = {arguments + 2, count - 2};
    auto [ready, pointers, otherwise] = find(arguments[0], backward_options(arguments[1]), arrays);
    if (!ready) return Py_NewRef(otherwise);
    std::vector<Object> results;
    for (const Output& output : ready->outputs) results.push_back(allocated(output));
    for (const Object& result : results) pointers.push_back(result ? address_of(result.get()) : 0);
    launch(*ready, pointers, arrays.given[2]);
    return as_tuple(std::move(results));
  });
}

// ---- Being taught.

template <typename... Places>
void parse(PyObject* tuple, const char* format, Places*... places) {
  if (!PyArg_ParseTuple(tuple, format, places...)) throw Raised();
}

// A cunorm.launch.Step.
Launch launch_of(PyObject* step) {
  const char *kernel = nullptr, *bytes = nullptr;
  unsigned long long function = 0;
  unsigned int grid = 0, block_x = 0, block_y = 0, shared_bytes = 0;
  Py_ssize_t size = 0;
  PyObject *attributes = nullptr, *places = nullptr;
  parse(step, "sKI(II)IO!y#O!", &kernel, &function, &grid, &block_x, &block_y, &shared_bytes, &PyTuple_Type,
        &attributes, &bytes, &size, &PyTuple_Type, &places);
  std::vector<std::pair<std::int32_t, std::uint32_t>> pairs;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(attributes); ++i) {
    int id = 0;
    unsigned int value = 0;
    parse(PyTuple_GET_ITEM(attributes, i), "iI", &id, &value);
    pairs.emplace_back(id, value);
  }
  std::vector<int> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); ++i) {
    found.push_back(static_cast<int>(number(PyTuple_GET_ITEM(places, i))));
  }
  return Launch::of(kernel, function, grid, block_x, block_y, shared_bytes, pairs, std::string(bytes, size),
                    std::move(found));
}

// What Python has prepared, as cunorm.adapters.cupy.host has it; None for what launches nothing.
Ready ready_of(PyObject* given) {
  Ready ready = {};
  if (given == Py_None) return ready;
  PyObject *outputs = nullptr, *workspace = nullptr, *offsets = nullptr, *steps = nullptr, *device = nullptr,
           *call = nullptr;
  unsigned long long context = 0;
  parse(given, "O!OO!O!KOO", &PyTuple_Type, &outputs, &workspace, &PyTuple_Type, &offsets, &PyTuple_Type, &steps,
        &context, &device, &call);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); ++i) {
    PyObject *output = PyTuple_GET_ITEM(outputs, i), *shape = nullptr, *dtype = nullptr;
    if (output != Py_None) parse(output, "OO", &shape, &dtype);
    ready.outputs.push_back({shared(shape), shared(dtype)});
  }
  if (workspace != Py_None) ready.workspace = shared(workspace);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(offsets); ++i) {
    ready.scratch_offsets.push_back(number(PyTuple_GET_ITEM(offsets, i)));
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); ++i) {
    ready.launches.push_back(launch_of(PyTuple_GET_ITEM(steps, i)));
  }
  ready.context = context;
  ready.device = shared(device);
  ready.call = shared(call);
  return ready;
}

// Does nothing if everything was forgotten since the generation in which the preparation was found.
void teach(PyObject* op, std::int64_t options, PyObject* tensors, PyObject* given, std::int64_t begun) {
  Kind kind = {reinterpret_cast<std::intptr_t>(op), options};
  Pointers pointers;
  const Arrays arrays = {&PyTuple_GET_ITEM(tensors, 0), PyTuple_GET_SIZE(tensors)};
  if (!describe(arrays, kind, pointers)) return;
  auto ready = std::make_shared<Ready>(ready_of(given));
  for (Py_ssize_t i = 0; i < arrays.count; ++i) {
    if (arrays.given[i] != Py_None) ready->dtypes.push_back(attribute(arrays.given[i], names.dtype));
  }
  if (known.size() >= MOST_KNOWN) forget_all();
  if (begun != generation) return;
  std::shared_ptr<const Ready> replaced = std::move(ready);  // let go of when the table is whole
  known[std::move(kind)].swap(replaced);
}

// teach_forward(op, stats, tensors, ready, generation) and teach_backward(op, mask, tensors, ready, generation)
template <std::int64_t (*OPTIONS)(PyObject*)>
PyObject* teach_kind(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    PyObject *op = nullptr, *options = nullptr, *tensors = nullptr, *ready = nullptr;
    long long begun = 0;
    parse(arguments, "OOO!OL", &op, &options, &PyTuple_Type, &tensors, &ready, &begun);
    teach(op, OPTIONS(options), tensors, ready, begun);
    return Py_NewRef(Py_None);
  });
}

// use_driver(cuLaunchKernelEx, cuCtxGetCurrent)
PyObject* use_driver(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    unsigned long long launch = 0, context = 0;
    parse(arguments, "KK", &launch, &context);
    launch_kernel = reinterpret_cast<LaunchKernel>(launch);
    get_context = reinterpret_cast<GetContext>(context);
    return Py_NewRef(Py_None);
  });
}

// begin(cupy.ndarray, stream of a device, what makes a workspace)
PyObject* begin(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    parse(arguments, "OOO", &array_type, &current_stream, &allocate_workspace);
    for (PyObject* const object : {array_type, current_stream, allocate_workspace}) Py_INCREF(object);
    return Py_NewRef(Py_None);
  });
}

PyObject* forget(PyObject*, PyObject*) {
  ++generation;
  forget_all();
  return Py_NewRef(Py_None);
}

PyObject* current_generation(PyObject*, PyObject*) { return PyLong_FromLongLong(generation); }

template <typename Function>
PyCFunction method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"forward", method(forward), METH_FASTCALL, nullptr},
    {"backward", method(backward), METH_FASTCALL, nullptr},
    {"teach_forward", method(teach_kind<forward_options>), METH_VARARGS, nullptr},
    {"teach_backward", method(teach_kind<backward_options>), METH_VARARGS, nullptr},
    {"begin", method(begin), METH_VARARGS, nullptr},
    {"use_driver", method(use_driver), METH_VARARGS, nullptr},
    {"forget", method(forget), METH_NOARGS, nullptr},
    {"generation", method(current_generation), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "cunorm_cupy_host", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_cunorm_cupy_host() {
  return guarded([&]() -> PyObject* {
    PyObject** const places[] = {&names.data, &names.ptr, &names.device_id, &names.shape, &names.strides, &names.dtype};
    const char* const texts[] = {"data", "ptr", "device_id", "shape", "strides", "dtype"};
    for (std::size_t i = 0; i < 6; ++i) *places[i] = checked(PyUnicode_InternFromString(texts[i])).release();
    return PyModule_Create(&definition);
  });
}
