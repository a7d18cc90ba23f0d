// The pybind11 module fused_kernels._C: facts for Python. It knows shapes and plans, and neither torch nor a tensor.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "kernels/conv_transpose_avg_pool_plan.h"
#include "kernels/global_avg_pool_plan.h"

namespace py = pybind11;

namespace fused {
namespace {

// A Python integer, possibly symbolic: the checks are templates over their integer type, so the fake kernels run the very
// same ones, and a comparison becomes a guard where torch traces with dynamic shapes.
class PyInt {
 public:
  explicit PyInt(int64_t value) : object_(py::int_(value)) {}
  explicit PyInt(py::object object) : object_(std::move(object)) {}
  const py::object& object() const { return object_; }

  friend PyInt operator+(const PyInt& a, const PyInt& b) { return PyInt(a.object_ + b.object_); }
  friend PyInt operator-(const PyInt& a, const PyInt& b) { return PyInt(a.object_ - b.object_); }
  friend PyInt operator*(const PyInt& a, const PyInt& b) { return PyInt(a.object_ * b.object_); }
  // Floor division; the checks divide non-negative values only, where C++ agrees.
  friend PyInt operator/(const PyInt& a, const PyInt& b) { return PyInt(a.object_.attr("__floordiv__")(b.object_)); }
  friend PyInt operator%(const PyInt& a, const PyInt& b) { return PyInt(a.object_.attr("__mod__")(b.object_)); }
  friend bool operator<(const PyInt& a, const PyInt& b) { return py::bool_(a.object_ < b.object_); }
  friend bool operator==(const PyInt& a, const PyInt& b) { return a.object_.equal(b.object_); }
  friend bool operator!=(const PyInt& a, const PyInt& b) { return a.object_.not_equal(b.object_); }
  friend std::string show(const PyInt& value) { return py::str(value.object_); }

 private:
  py::object object_;
};

// (sizes, dtype, device), or None
using PyTensor = std::optional<std::tuple<std::vector<py::object>, std::string, std::string>>;

template <class Int>
Int from_python(const py::object& value) {
  if constexpr (std::is_same_v<Int, int64_t>)
    return value.cast<int64_t>();
  else
    return Int(value);
}

template <class Int>
class Info {
 public:
  explicit Info(const PyTensor& tensor) {
    if (!tensor) return;
    for (const py::object& size : std::get<0>(*tensor)) info_.sizes.push_back(from_python<Int>(size));
    info_.dtype = std::get<1>(*tensor);
    info_.device = std::get<2>(*tensor);
    info_.is_cpu = info_.device == "cpu";
  }
  const TensorInfo<Int>* get() const { return info_.dtype.empty() ? nullptr : &info_; }
  const TensorInfo<Int>& operator*() const { return info_; }

 private:
  TensorInfo<Int> info_;
};

std::vector<py::object> to_python(const std::vector<PyInt>& values) {
  std::vector<py::object> objects;
  for (const PyInt& value : values) objects.push_back(value.object());
  return objects;
}

using Ints = std::vector<int64_t>;

template <class Int>
auto check_chain(const std::string& op, bool logsumexp, const PyTensor& input, const PyTensor& weight,
                 const PyTensor& bias, const Ints& stride, const Ints& padding, const Ints& output_padding,
                 int64_t groups, const Ints& dilation, const PyTensor& scale, const PyTensor& shift) {
  return check_conv_transpose_global_avg_pool(op.c_str(), logsumexp, *Info<Int>(input), *Info<Int>(weight),
                                              Info<Int>(bias).get(), stride, padding, output_padding, groups, dilation,
                                              Info<Int>(scale).get(), Info<Int>(shift).get());
}

template <class Int>
auto check_pool(const PyTensor& input, const PyTensor& weight, const PyTensor& bias, const Ints& stride,
                const Ints& padding, const Ints& output_padding, int64_t groups, const Ints& dilation,
                const Ints& pool_kernel_size, const Ints& pool_stride, const PyTensor& scale1, const PyTensor& shift,
                const PyTensor& scale2) {
  return check_conv_transpose_avg_pool(*Info<Int>(input), *Info<Int>(weight), Info<Int>(bias).get(), stride, padding,
                                       output_padding, groups, dilation, pool_kernel_size, pool_stride,
                                       Info<Int>(scale1).get(), Info<Int>(shift).get(), Info<Int>(scale2).get());
}

int itemsize(const PyTensor& tensor) {
  const std::string& dtype = std::get<1>(*tensor);
  return dtype == "float64" ? 8 : dtype == "float32" ? 4 : 2;
}

std::string repr(const Launch& launch) {
  return join("Launch(kernel='", launch.kernel, "', grid=", launch.grid, ", block=", launch.block,
              ", shared_memory=", launch.shared_memory, ", programmatic=", launch.programmatic ? "True" : "False", ")");
}

std::vector<Launch> launches(const Plan& plan) {
  std::vector<Launch> result;
  for (int i = 0; i < plan.launches; ++i) result.insert(result.end(), plan.launch[i].times, plan.launch[i]);
  return result;
}

std::string repr(const Plan& plan) {
  std::string text;
  for (const Launch& launch : launches(plan)) text += (text.empty() ? "" : ", ") + repr(launch);
  return join("Plan(variant='", plan.variant, "', launches=[", text, "], workspace=", plan.workspace,
              ", bytes_read=", plan.bytes_read, ", bytes_written=", plan.bytes_written,
              ", operations=", plan.operations, ")");
}

ConvDim conv_dim(int64_t input, int64_t kernel, int64_t stride, int64_t padding, int64_t output_padding,
                 int64_t dilation) {
  return {input, kernel, stride, padding, output_padding, dilation};
}

std::pair<int64_t, int64_t> pair(const Range& range) { return {range.begin, range.end}; }

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Shape arithmetic and launch plans of fused_kernels, as the kernels themselves use them.";

  py::class_<DeviceProperties>(m, "DeviceProperties", "The facts of a CUDA device that launch choices depend on.")
      .def(py::init([](int compute_capability, int multiprocessors, int64_t shared_memory_per_block,
                       std::optional<int> code_capability) {
             return DeviceProperties{compute_capability, multiprocessors, shared_memory_per_block,
                                     code_capability.value_or(compute_capability)};
           }),
           py::arg("compute_capability") = DeviceProperties().compute_capability,
           py::arg("multiprocessors") = DeviceProperties().multiprocessors,
           py::arg("shared_memory_per_block") = DeviceProperties().shared_memory_per_block,
           py::arg("code_capability") = py::none(),
           "The defaults are an H200's; code_capability is compute_capability's, where left out.")
      .def_readonly("compute_capability", &DeviceProperties::compute_capability, "major * 10 + minor")
      .def_readonly("multiprocessors", &DeviceProperties::multiprocessors)
      .def_readonly("shared_memory_per_block", &DeviceProperties::shared_memory_per_block, "opt-in maximum, bytes")
      .def_readonly("code_capability", &DeviceProperties::code_capability, "of the code that the device runs");

  py::class_<Launch>(m, "Launch", "One kernel launch.")
      .def_property_readonly(
          "kernel", [](const Launch& l) { return l.kernel; }, "name in the .cu file")
      .def_readonly("grid", &Launch::grid, "blocks")
      .def_readonly("block", &Launch::block, "threads per block")
      .def_readonly("shared_memory", &Launch::shared_memory, "dynamic shared memory per block, bytes")
      .def_readonly("programmatic", &Launch::programmatic, "may start before the launch before it has ended")
      .def("__repr__", [](const Launch& l) { return repr(l); });

  py::class_<Plan>(m, "Plan", "What a call would launch and move.")
      .def_property_readonly(
          "variant", [](const Plan& p) { return p.variant; }, "the way taken, in words")
      .def_property_readonly("launches", &launches, "list of Launch, in stream order")
      .def_readonly("workspace", &Plan::workspace, "temporary device memory, bytes")
      .def_readonly("bytes_read", &Plan::bytes_read, "the input and the weight once")
      .def_readonly("bytes_written", &Plan::bytes_written, "the output once")
      .def_readonly("operations", &Plan::operations, "additions and multiplications")
      .def("__repr__", [](const Plan& p) { return repr(p); });

  // Checks: raise RuntimeError as the op does, or return the output's shape. Tensors come as (sizes, dtype, device).
  m.def("check_global_avg_pool",
        [](const PyTensor& input) { return to_python(check_global_avg_pool(*Info<PyInt>(input))); });
  m.def("check_conv_transpose_global_avg_pool",
        [](const std::string& op, bool logsumexp, const PyTensor& input, const PyTensor& weight, const PyTensor& bias,
           const Ints& stride, const Ints& padding, const Ints& output_padding, int64_t groups, const Ints& dilation,
           const PyTensor& scale, const PyTensor& shift) {
          return to_python(check_chain<PyInt>(op, logsumexp, input, weight, bias, stride, padding, output_padding,
                                              groups, dilation, scale, shift)
                               .output);
        });
  m.def("check_conv_transpose_avg_pool",
        [](const PyTensor& input, const PyTensor& weight, const PyTensor& bias, const Ints& stride, const Ints& padding,
           const Ints& output_padding, int64_t groups, const Ints& dilation, const Ints& pool_kernel_size,
           const Ints& pool_stride, const PyTensor& scale1, const PyTensor& shift, const PyTensor& scale2) {
          return to_python(check_pool<PyInt>(input, weight, bias, stride, padding, output_padding, groups, dilation,
                                             pool_kernel_size, pool_stride, scale1, shift, scale2)
                               .output);
        });

  // Plans: the same arguments, and the device.
  m.def("plan_global_avg_pool", [](const DeviceProperties& device, bool channels_last, const PyTensor& input) -> Plan {
    const Info<int64_t> info(input);
    check_global_avg_pool(*info);
    return plan_global_avg_pool(global_pool_problem((*info).sizes, itemsize(input), channels_last), device);
  });
  m.def("plan_conv_transpose_global_avg_pool",
        [](const DeviceProperties& device, bool channels_last, const std::string& op, bool logsumexp,
           const PyTensor& input, const PyTensor& weight, const PyTensor& bias, const Ints& stride, const Ints& padding,
           const Ints& output_padding, int64_t groups, const Ints& dilation, const PyTensor& scale,
           const PyTensor& shift) -> Plan {
          const auto checked = check_chain<int64_t>(op, logsumexp, input, weight, bias, stride, padding, output_padding,
                                                    groups, dilation, scale, shift);
          return plan_global_avg_pool(global_pool_problem(checked.conv, logsumexp, itemsize(input), channels_last,
                                                          segment_inputs(checked.conv)),
                                      device);
        });
  m.def("plan_conv_transpose_avg_pool",
        [](const DeviceProperties& device, bool channels_last, const PyTensor& input, const PyTensor& weight,
           const PyTensor& bias, const Ints& stride, const Ints& padding, const Ints& output_padding, int64_t groups,
           const Ints& dilation, const Ints& pool_kernel_size, const Ints& pool_stride, const PyTensor& scale1,
           const PyTensor& shift, const PyTensor& scale2) -> Plan {
          const auto checked = check_pool<int64_t>(input, weight, bias, stride, padding, output_padding, groups,
                                                   dilation, pool_kernel_size, pool_stride, scale1, shift, scale2);
          return plan_conv_transpose_avg_pool(
              avg_pool_problem(checked, itemsize(input), std::get<1>(*input) == "bfloat16", channels_last), device);
        });

  // Geometry of one spatial dimension (csrc/kernels/geometry.h).
  const auto dim = [](const char* name) { return py::arg(name); };
  m.def(
      "conv_transpose_output_size",
      [](int64_t input, int64_t kernel, int64_t stride, int64_t padding, int64_t output_padding, int64_t dilation) {
        return conv_transpose_output_size(conv_dim(input, kernel, stride, padding, output_padding, dilation));
      },
      dim("input"), dim("kernel"), dim("stride") = 1, dim("padding") = 0, dim("output_padding") = 0,
      dim("dilation") = 1, "Output size of a transposed convolution.");
  m.def(
      "tap_input_range",
      [](int64_t tap, int64_t input, int64_t kernel, int64_t stride, int64_t padding, int64_t output_padding,
         int64_t dilation) {
        return pair(tap_input_range(conv_dim(input, kernel, stride, padding, output_padding, dilation), tap));
      },
      dim("tap"), dim("input"), dim("kernel"), dim("stride") = 1, dim("padding") = 0, dim("output_padding") = 0,
      dim("dilation") = 1, "[begin, end) of the inputs that a tap sends into the output; empty if end <= begin.");
  m.def(
      "input_tap_range",
      [](int64_t index, int64_t input, int64_t kernel, int64_t stride, int64_t padding, int64_t output_padding,
         int64_t dilation) {
        return pair(input_tap_range(conv_dim(input, kernel, stride, padding, output_padding, dilation), index));
      },
      dim("index"), dim("input"), dim("kernel"), dim("stride") = 1, dim("padding") = 0, dim("output_padding") = 0,
      dim("dilation") = 1, "[begin, end) of the taps that send an input into the output; empty if end <= begin.");
  m.def(
      "segment_input",
      [](int64_t input, int64_t kernel, int64_t stride, int64_t padding, int64_t output_padding, int64_t dilation) {
        const Segmentation cut = segment_input(conv_dim(input, kernel, stride, padding, output_padding, dilation));
        std::vector<std::pair<int64_t, int64_t>> segments, taps;
        for (const Range& range : cut.segments) segments.push_back(pair(range));
        for (const Range& range : cut.tap_range) taps.push_back(pair(range));
        return std::make_pair(segments, taps);
      },
      dim("input"), dim("kernel"), dim("stride") = 1, dim("padding") = 0, dim("output_padding") = 0,
      dim("dilation") = 1,
      "(segments, taps): the input cut into [begin, end) in which the same taps apply, and per tap the run of segments "
      "that it uses.");
  m.def(
      "avg_pool_taps",
      [](int64_t input, int64_t kernel, int64_t stride, int64_t padding, int64_t output_padding, int64_t dilation,
         int64_t pool_kernel, int64_t pool_stride) {
        const PoolDim pool{conv_dim(input, kernel, stride, padding, output_padding, dilation), pool_kernel,
                           pool_stride};
        const Range offsets = pool.offsets();
        std::vector<std::tuple<int64_t, int64_t, int64_t>> taps;
        for (int64_t j = offsets.begin; j < offsets.end; ++j)
          if (!pool.is_hole(j)) taps.emplace_back(j, pool.taps(j).begin, pool.taps(j).end);
        return std::make_tuple(pool.output(), pool.step(), taps);
      },
      dim("input"), dim("kernel"), dim("stride") = 1, dim("padding") = 0, dim("output_padding") = 0,
      dim("dilation") = 1, dim("pool_kernel") = 2, dim("pool_stride") = 2,
      "(output size, step r, [(offset j, first tap, end of taps)]): the collapsed convolution, out[o] = 1/P * sum over "
      "j "
      "of x[o*r + j] * sum of W[first:end].");
}

}  // namespace fused
