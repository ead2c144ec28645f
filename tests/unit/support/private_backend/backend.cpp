// A private backend of PyTorch with two devices, whose memory is that of the machine and whose work the CPU does. Each
// operator that is not here is computed by the CPU, which PyTorch's fallback copies tensors to. Streams are numbers.

#include <cstdlib>
#include <cstring>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
constexpr size_t ALIGNMENT = 64;

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream = 0;
std::atomic<int64_t> held_bytes{0}, streams{0};

struct Memory final : c10::DeviceAllocator {
  struct Block {
    void* data;
    size_t size;
  };

  c10::DataPtr allocate(size_t size) override {
    auto* data = size ? std::aligned_alloc(ALIGNMENT, (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT) : nullptr;
    held_bytes += size;
    return {data, new Block{data, size}, &release, c10::Device(TYPE, current_device)};
  }

  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    held_bytes -= block->size;
    std::free(block->data);
    delete block;
  }

  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = held_bytes;
    return stats;
  }
};

Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  c10::Device getDevice() const override { return {TYPE, current_device}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }

  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  static c10::Stream stream(c10::Device device, c10::StreamId number) {
    return c10::Stream(c10::Stream::UNSAFE, device, number);
  }

  c10::Stream getStream(c10::Device device) const override { return stream(device, current_stream); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override { return stream(device, ++streams); }

  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(next.device(), current_stream);
    current_stream = next.id();
    return before;
  }

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    static int any;
    *event = &any;
  }

  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 2; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = memory.allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(TYPE, current_device)));
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(TYPE, current_device)));
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, c10::dtype_or_default(dtype));
}

// The same elements as a tensor on the CPU, in the same memory.
at::Tensor as_of_cpu(const at::Tensor& x) {
  if (x.device().is_cpu()) return x;
  auto bytes = static_cast<int64_t>(x.storage().nbytes());
  auto whole = at::from_blob(x.storage().mutable_data(), {bytes}, at::TensorOptions().dtype(at::kByte));
  auto same = at::empty({0}, x.options().device(at::kCPU));
  return same.set_(whole.storage(), x.storage_offset(), x.sizes(), x.strides());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  as_of_cpu(to).copy_(as_of_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar number(const at::Tensor& x) { return as_of_cpu(x).item(); }

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", number);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("unfold", at::native::unfold);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", at::native::resize_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage", at::native::set_);
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

const bool is_registered = [] {
  c10::SetAllocator(TYPE, &memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
