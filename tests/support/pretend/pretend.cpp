// A pretend accelerator: torch's PrivateUse1 as the device type `pretend`, several devices whose memory is the host's.
//
// Operators are torch's own for the CPU, on the same bytes, so results have the CPU's bits. What differs is what code for
// accelerators can get wrong: tensors of two devices do not mix, the devices have generators and streams of their own,
// backward passes run in threads of their own, and every wait of the host for a device is told (`set_wait_hook`).
// Beside it, the process group backend `pretendccl` stands in for NCCL: it takes tensors of these devices only, ignores
// tags, groups messages, and tells of each one (`set_message_hook`).

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstdlib>
#include <functional>
#include <mutex>
#include <set>

namespace {

namespace py = pybind11;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;

constexpr auto kType = DeviceType::PrivateUse1;
constexpr size_t kAlignment = 64;

DeviceIndex num_devices() {
  const char* text = std::getenv("PRETEND_DEVICES");
  return static_cast<DeviceIndex>(text ? std::atoi(text) : 1);
}

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream = 0;
thread_local bool inside = false;  // an operator of these devices runs: what it does is no wait of the host

// --- telling Python ---------------------------------------------------------------------------------------------------

py::object* wait_hook = nullptr;
py::object* message_hook = nullptr;

void host_waits(const std::string& what) {
  if (inside || !wait_hook || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  (*wait_hook)(what);
}

// --- memory -----------------------------------------------------------------------------------------------------------

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes) TORCH_CHECK(posix_memalign(&data, kAlignment, bytes) == 0, "out of pretended memory");
    return {data, data, &std::free, Device(kType, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator);

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned_blocks;

void free_pinned(void* data) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks.erase(static_cast<const char*>(data));
  }
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, kAlignment, std::max<size_t>(bytes, 1)) == 0, "out of memory");
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks[static_cast<const char*>(data)] = std::max<size_t>(bytes, 1);
    return {data, data, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned_blocks.upper_bound(static_cast<const char*>(data));
  if (after == pinned_blocks.begin()) return false;
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}

// --- generators -------------------------------------------------------------------------------------------------------

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex index)
      : c10::GeneratorImpl(Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offsets"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offsets"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
  at::Generator inner;
};

at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < num_devices(); ++i) made.push_back(at::make_generator<DeviceGenerator>(i));
    return made;
  }();
  return all.at(index < 0 ? current_device : index);
}

// --- devices, streams, events -----------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < num_devices(), "no such pretended device: ", device);
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::UNSAFE, device, current_stream); }
  c10::Stream getDefaultStream(Device device) const override { return c10::Stream(c10::Stream::UNSAFE, device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    static std::atomic<int64_t> last{0};
    return c10::Stream(c10::Stream::UNSAFE, device, ++last);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { host_waits("synchronize"); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { std::free(event); }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = std::malloc(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { host_waits("event"); }
  void synchronizeDevice(const DeviceIndex) const override { host_waits("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  DeviceIndex deviceCount() const override { return num_devices(); }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(kType, index)); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(Device(kType, index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current_device : index);
  }
  Device getDeviceFromPtr(void*) const override { return Device(kType, current_device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto data = device_allocator.allocate(bytes);
    if (storage.nbytes() && bytes) std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(bytes);
  }
};

// --- operators: torch's for the CPU, on the same bytes ----------------------------------------------------------------

/// Return a tensor of another device type on the same memory, which it keeps.
at::Tensor same_bytes(const at::Tensor& tensor, Device device) {
  if (!tensor.defined()) return tensor;
  c10::DispatchKey key = device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::PrivateUse1;
  auto* kept = new c10::Storage(tensor.storage());
  c10::DataPtr data(const_cast<void*>(kept->data()), kept, [](void* held) { delete static_cast<c10::Storage*>(held); }, device);
  c10::Allocator* allocator = device.is_cpu() ? c10::GetCPUAllocator() : &device_allocator;
  c10::Storage storage(c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(data), allocator, true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType ? same_bytes(tensor, Device(DeviceType::CPU)) : tensor;
}

at::Tensor on_device(const at::Tensor& tensor, DeviceIndex index) { return same_bytes(tensor, Device(kType, index)); }

struct Inside {
  Inside() : before(inside) { inside = true; }
  ~Inside() { inside = before; }
  bool before;
};

const std::set<std::string> kReadsValues = {
    "aten::equal",         "aten::nonzero",     "aten::masked_select",      "aten::_unique2",
    "aten::unique_dim",    "aten::bincount",    "aten::unique_consecutive", "aten::repeat_interleave",
    "aten::nonzero_static"};

void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto num_arguments = schema.arguments().size();
  const auto begin = stack->size() - num_arguments;
  DeviceIndex index = -1;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // (given, on the host)
  auto convert = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kType) {
      TORCH_CHECK(tensor.device().is_cpu() && tensor.dim() == 0, "tensors of two devices meet in ", schema.name(), ": ",
                  tensor.device(), " with shape ", tensor.sizes(), " beside a device of type pretend");
      return tensor;
    }
    TORCH_CHECK(index < 0 || index == tensor.device().index(), "tensors of two devices meet in ", schema.name(),
                ": pretend:", static_cast<int>(index), " and ", tensor.device());
    index = tensor.device().index();
    pairs.emplace_back(tensor, on_host(tensor));
    return pairs.back().second;
  };
  at::Generator* generator = nullptr;
  bool generator_argument = false;
  std::vector<size_t> given_of_argument(num_arguments, SIZE_MAX);
  for (size_t i = 0; i < num_arguments; ++i) {
    IValue& value = (*stack)[begin + i];
    const bool takes_generator = schema.arguments()[i].type()->str() == "Generator?";
    if (value.isTensor()) {
      given_of_argument[i] = pairs.size();
      value = convert(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> converted;
      for (const at::Tensor& tensor : value.toTensorVector()) converted.push_back(convert(tensor));
      value = converted;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> converted;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        converted.push_back(tensor.has_value() ? std::optional<at::Tensor>(convert(*tensor)) : std::nullopt);
      value = converted;
    } else if (value.isDevice()) {
      if (value.toDevice().type() == kType && index < 0) index = value.toDevice().index();
      value = Device(DeviceType::CPU);
    } else if (takes_generator) {
      generator_argument = true;
      if (value.isNone()) continue;
      auto given = value.toGenerator();
      TORCH_CHECK(given.device().type() == kType, "a generator of the host in ", schema.name());
      value = static_cast<DeviceGenerator*>(given.unsafeGetGeneratorImpl())->inner;
    }
  }
  if (index < 0) index = current_device;
  if (generator_argument) {
    for (size_t i = 0; i < num_arguments; ++i)
      if (schema.arguments()[i].type()->str() == "Generator?" && (*stack)[begin + i].isNone())
        (*stack)[begin + i] = static_cast<DeviceGenerator*>(default_generator(index).unsafeGetGeneratorImpl())->inner;
  } else if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    generator = &static_cast<DeviceGenerator*>(default_generator(index).unsafeGetGeneratorImpl())->inner;
  }
  if (kReadsValues.count(schema.name())) host_waits(schema.name());
  {
    Inside here;
    at::Tensor hosts_state;
    const auto& hosts = at::detail::getDefaultCPUGenerator();
    if (generator) {
      hosts_state = hosts.get_state();
      hosts.unsafeGetGeneratorImpl()->set_state(*generator->get_state().unsafeGetTensorImpl());
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    if (generator) {
      generator->unsafeGetGeneratorImpl()->set_state(*hosts.get_state().unsafeGetTensorImpl());
      hosts.unsafeGetGeneratorImpl()->set_state(*hosts_state.unsafeGetTensorImpl());
    }
  }
  auto returned = [&](const at::Tensor& result) -> at::Tensor {
    if (!result.defined()) return result;
    for (auto& [given, host] : pairs) {
      if (!host.is_same(result)) continue;
      if (!given.sizes().equals(host.sizes()) || !given.strides().equals(host.strides())) {  // an output was resized
        auto made = on_device(host, index);
        given.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
        given.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
      }
      return given;
    }
    return on_device(result, index);
  };
  const auto first = stack->size() - schema.returns().size();
  for (size_t i = first; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = returned(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> converted;
      for (const at::Tensor& tensor : value.toTensorVector()) converted.push_back(returned(tensor));
      value = converted;
    }
  }
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.has_value() && device->has_index() ? *device : Device(kType, current_device));
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.has_value() && device->has_index() ? *device : Device(kType, current_device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

/// What CUDA would wait for: every copy to the host, and one from it, unless it is pinned memory and asynchronous.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& into, bool non_blocking) {
  const bool reads = self.device().type() == kType && !(into.device().type() == kType);
  const bool writes = self.device().is_cpu() && !self.unsafeGetTensorImpl()->is_wrapped_number();
  if (self.numel() && reads && !(non_blocking && into.is_pinned())) host_waits("copy to the host");
  if (self.numel() && writes && !(non_blocking && self.is_pinned())) host_waits("copy from the host");
  Inside here;
  on_host(into).copy_(on_host(self));
  return into;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& into) {
  at::native::resize_(into, self.sizes());
  return copy_from(self, into, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  host_waits("item");
  Inside here;
  return on_host(self).item();
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

void record_stream(at::Tensor&, c10::Stream) {}  // memory is never used again too early here

// torch's dropout divides by (1 - p) on the CPU, and on accelerators multiplies by the quotient, which rounds otherwise.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (p == 0 || (train.has_value() && !*train)) return {input.clone(), at::ones_like(input)};
  auto noise = at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
  return {input.mul(noise), noise};
}
at::Tensor dropout_backward(const at::Tensor& grad, const at::Tensor& noise, double) { return grad.mul(noise); }

// Attention by the CPU's flash kernel, through the operator that torch leaves to accelerators.
int64_t sdp_choice(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
                   double p, bool causal, std::optional<double> scale, bool grouped) {
  std::optional<at::Tensor> host_mask;
  if (mask.has_value()) host_mask = on_host(*mask);
  // The host's tensors carry no graph, and must seem to need one where these do.
  auto like = [](const at::Tensor& tensor) { return on_host(tensor).requires_grad_(tensor.requires_grad()); };
  const auto choice = at::_fused_sdp_choice(like(q), like(k), like(v), host_mask, p, causal, scale, grouped);
  return choice == 1 ? 4 /* overrideable */ : choice;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>
attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& bias, double p,
          bool causal, bool, std::optional<double> scale) {
  std::optional<at::Tensor> mask;
  if (bias.has_value() && bias->defined()) mask = on_host(*bias);
  Inside here;
  auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(on_host(q), on_host(k), on_host(v), p, causal, mask, scale);
  const auto index = q.device().index();
  return {on_device(out, index), on_device(logsumexp, index), at::Tensor(), at::Tensor(), q.size(2), k.size(2),
          at::Tensor(), at::Tensor(), at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& bias,
    std::array<bool, 4>, const at::Tensor& out, const at::Tensor& logsumexp, const at::Tensor&, const at::Tensor&,
    c10::SymInt, c10::SymInt, double p, bool causal, const at::Tensor&, const at::Tensor&, std::optional<double> scale) {
  std::optional<at::Tensor> mask;
  if (bias.defined()) mask = on_host(bias);
  Inside here;
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      on_host(grad), on_host(q), on_host(k), on_host(v), on_host(out), on_host(logsumexp), p, causal, mask, scale);
  const auto index = q.device().index();
  return {on_device(dq, index), on_device(dk, index), on_device(dv, index), at::Tensor()};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, c10::Storage)>(&at::native::set_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("native_dropout", TORCH_FN(dropout));
  m.impl("native_dropout_backward", TORCH_FN(dropout_backward));
  m.impl("_fused_sdp_choice", TORCH_FN(sdp_choice));
  m.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(attention));
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(attention_backward));
  // Operators that torch composes of others for devices it does not know, where the CPU has a kernel of its own.
  auto boxed = [&](const std::string& name) {
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&call_on_host>());
  };
  boxed("convolution");
  boxed("convolution_backward");
  const std::set<std::string> here = {
      "empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "unfold", "resize_",
      "set_.source_Storage_storage_offset", "set_.source_Tensor", "_copy_from", "_copy_from_and_resize",
      "_local_scalar_dense", "native_dropout", "native_dropout_backward", "_fused_sdp_choice", "copy_", "_to_copy",
      "convolution", "convolution_backward"};
  for (const auto& full : c10::Dispatcher::singleton().getAllOpNames()) {
    if (full.name.rfind("aten::", 0) != 0) continue;
    auto op = c10::Dispatcher::singleton().findOp(full);
    if (!op.has_value() || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional))
      continue;
    const auto name = full.name.substr(6) + (full.overload_name.empty() ? "" : "." + full.overload_name);
    bool view = false;
    for (const auto& result : op->schema().returns())
      view = view || (result.alias_info() && !result.alias_info()->isWrite());
    if (!view && !here.count(name)) boxed(name);
  }
}

// --- autocast: the CPU's lists ----------------------------------------------------------------------------------------

#define HALF(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  HALF(conv1d)
  HALF(conv2d)
  HALF(conv3d)
  HALF(conv_transpose1d)
  HALF(conv_transpose2d, input)
  HALF(conv_transpose3d, input)
  HALF(bmm)
  HALF(mm)
  HALF(baddbmm)
  HALF(addmm)
  HALF(addbmm)
  HALF(linear)
  HALF(matmul)
  HALF(prelu)
  HALF(scaled_dot_product_attention)
  SINGLE(mse_loss)
  SINGLE(binary_cross_entropy)
  SINGLE(kl_div)
  SINGLE(multi_margin_loss)
  WIDEST(cat)
  WIDEST(stack)
}

// --- messages ---------------------------------------------------------------------------------------------------------

class Messages final : public c10d::Backend {
 public:
  explicit Messages(c10::intrusive_ptr<c10d::Backend> carrier)
      : Backend(carrier->getRank(), carrier->getSize()), carrier_(std::move(carrier)) {}

  const std::string getBackendName() const override { return "pretendccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds) override {}
  void startCoalescing() override { told("begin", -1, {}); }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    told("end", -1, {});
    auto all = c10::make_intrusive<All>(std::move(works_));
    works_.clear();
    return all;
  }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int) override {
    told("send", to, tensors);
    auto host = mine(tensors);
    return kept(carrier_->send(host, to, 0));
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int) override {
    told("recv", from, tensors);
    auto host = mine(tensors);
    return kept(carrier_->recv(host, from, 0));
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& o) override {
    told("broadcast", o.rootRank, tensors);
    auto host = mine(tensors);
    return carrier_->broadcast(host, o);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& o) override {
    told("allreduce", -1, tensors);
    auto host = mine(tensors);
    return carrier_->allreduce(host, o);
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& o) override {
    told("allreduce", -1, tensors);
    auto host = mine(tensors);
    return carrier_->allreduce_coalesced(host, o);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& into, std::vector<at::Tensor>& tensors,
                                           const c10d::AllgatherOptions& o) override {
    told("allgather", -1, tensors);
    std::vector<std::vector<at::Tensor>> rows;
    for (auto& row : into) rows.push_back(mine(row));
    auto host = mine(tensors);
    return carrier_->allgather(rows, host, o);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& into, at::Tensor& tensor,
                                                 const c10d::AllgatherOptions& o) override {
    told("allgather", -1, {tensor});
    auto host_into = mine(into), host = mine(tensor);
    return carrier_->_allgather_base(host_into, host, o);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& into, at::Tensor& tensor,
                                                      const c10d::ReduceScatterOptions& o) override {
    told("reduce_scatter", -1, {tensor});
    auto host_into = mine(into), host = mine(tensor);
    return carrier_->_reduce_scatter_base(host_into, host, o);
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& into,
                                                                 std::vector<at::Tensor>& tensors,
                                                                 const c10d::AllgatherOptions& o) override {
    told("allgather", -1, tensors);
    auto host_into = mine(into), host = mine(tensors);
    return carrier_->allgather_into_tensor_coalesced(host_into, host, o);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& into,
                                                                 std::vector<at::Tensor>& tensors,
                                                                 const c10d::ReduceScatterOptions& o) override {
    told("reduce_scatter", -1, tensors);
    auto host_into = mine(into), host = mine(tensors);
    return carrier_->reduce_scatter_tensor_coalesced(host_into, host, o);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& into, at::Tensor& tensor, std::vector<int64_t>& out,
                                               std::vector<int64_t>& in, const c10d::AllToAllOptions& o) override {
    told("alltoall", -1, {tensor});
    auto host_into = mine(into), host = mine(tensor);
    return carrier_->alltoall_base(host_into, host, out, in, o);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override { return carrier_->barrier(o); }

 private:
  struct All final : c10d::Work {
    explicit All(std::vector<c10::intrusive_ptr<c10d::Work>> works) : works(std::move(works)) {}
    bool wait(std::chrono::milliseconds timeout) override {
      for (auto& work : works) work->wait(timeout);
      return true;
    }
    bool isCompleted() override { return true; }
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
  };

  c10::intrusive_ptr<c10d::Work> kept(c10::intrusive_ptr<c10d::Work> work) {
    works_.push_back(work);
    if (works_.size() > 4096) works_.erase(works_.begin());
    return work;
  }
  at::Tensor mine(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device().type() == kType, "pretendccl takes tensors of pretended devices, not of ", tensor.device());
    TORCH_CHECK(tensor.device().index() == current_device, "a message of ", tensor.device(), " while the current device is ",
                static_cast<int>(current_device));
    return on_host(tensor);
  }
  std::vector<at::Tensor> mine(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> made;
    for (auto& tensor : tensors) made.push_back(mine(tensor));
    return made;
  }
  void told(const std::string& what, int other, const std::vector<at::Tensor>& tensors) {
    if (!message_hook) return;
    int64_t bytes = 0;
    for (auto& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
    py::gil_scoped_acquire gil;
    (*message_hook)(what, other, bytes, current_stream);
  }

  c10::intrusive_ptr<c10d::Backend> carrier_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sdp_choice)
}

PYBIND11_MODULE(PRETEND_MODULE, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("device_count", &num_devices);
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int index) { Guard().setDevice(Device(kType, static_cast<DeviceIndex>(index))); });
  m.def("default_generator", [](int index) { return default_generator(static_cast<DeviceIndex>(index)); });
  m.def("set_wait_hook", [](py::object hook) { wait_hook = new py::object(std::move(hook)); });
  m.def("set_message_hook", [](py::object hook) { message_hook = new py::object(std::move(hook)); });
  m.def("messages", [](const c10::intrusive_ptr<c10d::Backend>& carrier) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Messages>(carrier);
  });
}
