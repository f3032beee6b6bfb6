// A PyTorch device on host memory: tensors of it hold ordinary memory, and every operation runs on the CPU.
// What it is for: a tensor that was left on the wrong device is refused here as it is on CUDA.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <ATen/CPUGeneratorImpl.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;
// Dispatch follows the highest backend, PrivateUse1. The other one is there as `parameter.data = tensor_of_another_device`
// is only allowed between backends that PyTorch lists as dense: CUDA is one, PrivateUse1 is not.
const c10::DispatchKeySet kKeys({c10::DispatchKey::PrivateUse1, c10::DispatchKey::HPU});

// -- memory: the host's, counted ------------------------------------------------------------------------------------

int64_t allocated = 0, peak = 0;

struct Block {
  void* memory;
  size_t bytes;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated -= static_cast<int64_t>(block->bytes);
  std::free(block->memory);
  delete block;
}

struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kDevice, 0);
    if (bytes == 0) return {nullptr, device};
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 64, bytes) == 0, "simulated device: out of memory");
    allocated += static_cast<int64_t>(bytes);
    peak = std::max(peak, allocated);
    return {memory, new Block{memory, bytes}, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};

HostAllocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

// -- one device, one stream -------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return {kDevice, 0}; }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void init() const override {}
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto fresh = allocator.allocate(bytes);
    std::memcpy(fresh.mutable_get(), impl->data(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

// -- the same memory as a CPU tensor ------------------------------------------------------------------------------------

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.device().is_privateuseone()) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  auto host = at::for_blob(tensor.data_ptr(), tensor.sizes())
                  .strides(tensor.strides())
                  .deleter([tensor](void*) {})
                  .options(options)
                  .make_tensor();
  return host;
}

at::Tensor to_device(const at::Tensor& host) {
  auto result = at::empty_strided(host.sizes(), host.strides(), host.options().device(kDevice));
  on_host(result).copy_(host);
  return result;
}

// -- kernels of the device itself ---------------------------------------------------------------------------------------

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  at::NoGradGuard no_grad;
  on_host(target).copy_(on_host(self));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  at::NoGradGuard no_grad;
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  on_host(target).copy_(on_host(self));
  return target;
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return at::_local_scalar_dense(on_host(self)); }

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  int64_t count = c10::multiply_integers(size);
  size_t bytes = (static_cast<size_t>(self.storage_offset()) + static_cast<size_t>(count)) * self.itemsize();
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_source(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  int64_t count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_source(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_source(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  at::NoGradGuard no_grad;
  std::optional<at::Tensor> host_bias;
  if (bias.has_value() && bias->defined()) host_bias = on_host(*bias);
  return to_device(at::convolution(
      on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> wanted) {
  at::NoGradGuard no_grad;
  auto [to_input, to_weight, to_bias] = at::convolution_backward(
      on_host(gradient), on_host(input), on_host(weight), c10::IntArrayRef{weight.size(transposed ? 1 : 0)}, stride,
      padding, dilation, transposed, output_padding, groups, wanted);
  auto moved = [](const at::Tensor& host) { return host.defined() ? to_device(host) : host; };
  return {moved(to_input), moved(to_weight), moved(to_bias)};
}

// -- all other operations -----------------------------------------------------------------------------------------------

void refuse_host(const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK(
      !tensor.defined() || !tensor.device().is_cpu() || tensor.dim() == 0, name,
      ": Expected all tensors to be on the same device, but found one on sim and one on cpu");
}

// What CUDA's own kernels refuse: cpu_fallback would copy each argument to the host before a kernel can compare them.
// Numbers of the host and the indices of index and index_put are taken there too. The project gives no operation of a
// device a generator of it, and none of the host's is right.
void refuse_others(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& name = op.schema().name();
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) refuse_host(name, value.toTensor());
    else if (value.isTensorList()) for (const auto& each : value.toTensorVector()) refuse_host(name, each);
    else if (value.isGenerator())
      TORCH_CHECK(false, name, ": Expected a 'sim' device type for generator but found 'cpu'");
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_others(op, *stack);
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_source);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("on_host", &on_host, "The same memory as a CPU tensor.");
  m.def("allocated", [] { return allocated; });
  m.def("peak", [] { return peak; });
  m.def("reset_peak", [] { peak = allocated; });
}
