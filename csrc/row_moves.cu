// Moves rows of tensors between GPUs of one node with their copy engines, and inside one GPU with two small kernels.
//
// A plain C interface over raw addresses, called through ctypes (distca/transport/native.py): no headers of torch or
// NVSHMEM are needed, so it compiles in seconds and fits every version of both. Every function queues work on the given
// stream, returns at once, and answers with a CUDA error code (0: queued).

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr int kWarpsPerBlock = 8;
constexpr int kBlocksPerMultiprocessor = 8;
constexpr int kMostPushingBlocks = 32;  // enough for a link, and few multiprocessors
constexpr int kMostOperations = 128;  // cuStreamBatchMemOp takes fewer than 256 at once

int blocks_for(int64_t rows) {
  static int multiprocessors = [] {
    int device = 0, count = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
  }();
  int64_t wanted = (rows + kWarpsPerBlock - 1) / kWarpsPerBlock;
  return static_cast<int>(std::min<int64_t>(wanted, int64_t{multiprocessors} * kBlocksPerMultiprocessor));
}

// One warp a row: 32 lanes read neighbouring units, and every lane has several loads under way.
template <typename Unit>
__device__ void move_row(const Unit* __restrict__ from, Unit* __restrict__ to, int units, int lane) {
  constexpr int kLoads = 8;
  int unit = lane;
  for (; unit + 32 * (kLoads - 1) < units; unit += 32 * kLoads) {
    Unit values[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) values[k] = from[unit + 32 * k];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) to[unit + 32 * k] = values[k];
  }
  for (; unit < units; unit += 32) to[unit] = from[unit];
}

template <typename Unit>
__global__ void move_rows_kernel(const Unit* source, const int64_t* source_rows, Unit* destination,
                                 const int64_t* destination_rows, int64_t rows, int units) {
  const int lane = threadIdx.x % 32;
  const int64_t stride = int64_t{gridDim.x} * kWarpsPerBlock;
  for (int64_t i = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / 32; i < rows; i += stride) {
    move_row(source + (source_rows ? source_rows[i] : i) * units,
             destination + (destination_rows ? destination_rows[i] : i) * units, units, lane);
  }
}

__device__ uint64_t load_acquire_system(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// Waits for room, writes rows into a peer's memory, and says that they arrived: one launch for what is too small to be
// worth a copy engine's start. Rows are consecutive there. The last block to finish gives the signal.
template <typename Unit>
__global__ void push_rows_kernel(const Unit* source, const int64_t* source_rows, Unit* destination, int64_t rows,
                                 int units, const uint64_t* room, uint64_t room_value, uint64_t* arrived,
                                 uint64_t arrived_value, unsigned int* finished_blocks) {
  if (threadIdx.x == 0) {
    while (load_acquire_system(room) < room_value) __nanosleep(100);
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const int64_t stride = int64_t{gridDim.x} * kWarpsPerBlock;
  for (int64_t i = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / 32; i < rows; i += stride)
    move_row(source + source_rows[i] * units, destination + i * units, units, lane);
  if (!arrived) return;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(finished_blocks, 1) == gridDim.x - 1) {
    *finished_blocks = 0;
    __threadfence_system();
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(arrived), "l"(arrived_value) : "memory");
  }
}

template <typename Value>
__device__ float widen(Value value) { return static_cast<float>(value); }
template <typename Value>
__device__ Value narrow(float value) { return static_cast<Value>(value); }
template <>
__device__ __nv_bfloat16 narrow<__nv_bfloat16>(float value) { return __float2bfloat16_rn(value); }
template <>
__device__ __half narrow<__half>(float value) { return __float2half_rn(value); }

// total = row of destination, then each of its copies in the order given; rounded once.
template <typename Value>
__global__ void sum_rows_kernel(const Value* packed, const int64_t* copies, const int64_t* borders,
                                const int64_t* destination_rows, Value* destination, int64_t rows, int width) {
  constexpr int kPerLane = 16 / sizeof(Value);
  const int lane = threadIdx.x % 32;
  const int64_t stride = int64_t{gridDim.x} * kWarpsPerBlock;
  for (int64_t i = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / 32; i < rows; i += stride) {
    Value* to = destination + destination_rows[i] * width;
    for (int begin = lane * kPerLane; begin < width; begin += 32 * kPerLane) {
      Value values[kPerLane];
      float total[kPerLane];
      *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(to + begin);
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) total[k] = widen(values[k]);
      for (int64_t copy = borders[i]; copy < borders[i + 1]; ++copy) {
        *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(packed + copies[copy] * width + begin);
#pragma unroll
        for (int k = 0; k < kPerLane; ++k) total[k] += widen(values[k]);
      }
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) values[k] = narrow<Value>(total[k]);
      *reinterpret_cast<uint4*>(to + begin) = *reinterpret_cast<const uint4*>(values);
    }
  }
}

template <typename Unit>
int move_rows(const void* source, const int64_t* source_rows, void* destination, const int64_t* destination_rows,
              int64_t rows, int64_t row_bytes, cudaStream_t stream) {
  move_rows_kernel<<<blocks_for(rows), 32 * kWarpsPerBlock, 0, stream>>>(
      static_cast<const Unit*>(source), source_rows, static_cast<Unit*>(destination), destination_rows, rows,
      static_cast<int>(row_bytes / sizeof(Unit)));
  return cudaGetLastError();
}

template <typename Unit>
int push_rows(const void* source, const int64_t* source_rows, void* destination, int64_t rows, int64_t row_bytes,
              const uint64_t* room, uint64_t room_value, uint64_t* arrived, uint64_t arrived_value,
              unsigned int* finished_blocks, cudaStream_t stream) {
  int blocks = std::max(1, std::min(blocks_for(rows), kMostPushingBlocks));
  push_rows_kernel<<<blocks, 32 * kWarpsPerBlock, 0, stream>>>(
      static_cast<const Unit*>(source), source_rows, static_cast<Unit*>(destination), rows,
      static_cast<int>(row_bytes / sizeof(Unit)), room, room_value, arrived, arrived_value, finished_blocks);
  return cudaGetLastError();
}

template <typename Value>
int sum_rows(const void* packed, const int64_t* copies, const int64_t* borders, const int64_t* destination_rows,
             void* destination, int64_t rows, int64_t width, cudaStream_t stream) {
  sum_rows_kernel<<<blocks_for(rows), 32 * kWarpsPerBlock, 0, stream>>>(
      static_cast<const Value*>(packed), copies, borders, destination_rows, static_cast<Value*>(destination), rows,
      static_cast<int>(width));
  return cudaGetLastError();
}

// The driver function by name, so that the library loads where there is no driver.
CUresult batch_memory_operations(CUstream stream, std::vector<CUstreamBatchMemOpParams>& operations) {
  using Function = CUresult (*)(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);
  static Function function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &found, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<Function>(found);
  }();
  if (!function) return CUDA_ERROR_NOT_SUPPORTED;
  for (size_t begin = 0; begin < operations.size(); begin += kMostOperations) {
    size_t count = std::min<size_t>(kMostOperations, operations.size() - begin);
    CUresult result = function(stream, static_cast<unsigned int>(count), operations.data() + begin, 0);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// Copies row ranges with the copy engines. ranges: [count][3] source row, destination row, rows.
int distca_put_rows(const char* source, char* destination, const int64_t* ranges, int64_t count, int64_t row_bytes,
                    cudaStream_t stream) {
  if (count == 1) {
    return cudaMemcpyAsync(destination + ranges[1] * row_bytes, source + ranges[0] * row_bytes,
                           ranges[2] * row_bytes, cudaMemcpyDeviceToDevice, stream);
  }
  std::vector<const void*> from(count);
  std::vector<void*> to(count);
  std::vector<size_t> bytes(count);
  for (int64_t i = 0; i < count; ++i) {
    from[i] = source + ranges[3 * i] * row_bytes;
    to[i] = destination + ranges[3 * i + 1] * row_bytes;
    bytes[i] = ranges[3 * i + 2] * row_bytes;
  }
#if CUDART_VERSION >= 13000
  // One call, and the engines may work on several ranges at once.
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
  return cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), count, &attributes, &first, 1, stream);
#else
  for (int64_t i = 0; i < count; ++i) {
    cudaError_t error = cudaMemcpyAsync(to[i], from[i], bytes[i], cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
#endif
}

// Writes value to 64-bit words, on this GPU or a peer, after all earlier work of the stream is visible there.
int distca_signal(const uint64_t* addresses, int64_t count, uint64_t value, CUstream stream) {
  std::vector<CUstreamBatchMemOpParams> operations(count);
  for (int64_t i = 0; i < count; ++i) {
    operations[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    operations[i].writeValue.address = addresses[i];
    operations[i].writeValue.value64 = value;
    operations[i].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  }
  return batch_memory_operations(stream, operations);
}

// Holds the stream (not the host, and no multiprocessor) until every word of this GPU is at least value.
int distca_await(const uint64_t* addresses, int64_t count, uint64_t value, CUstream stream) {
  std::vector<CUstreamBatchMemOpParams> operations(count);
  for (int64_t i = 0; i < count; ++i) {
    operations[i].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    operations[i].waitValue.address = addresses[i];
    operations[i].waitValue.value64 = value;
    operations[i].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  }
  return batch_memory_operations(stream, operations);
}

// destination[destination_rows[i]] = source[source_rows[i]] for i < rows; a null index means i itself.
int distca_move_rows(const void* source, const int64_t* source_rows, void* destination,
                     const int64_t* destination_rows, int64_t rows, int64_t row_bytes, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const uint64_t alignment =
      reinterpret_cast<uint64_t>(source) | reinterpret_cast<uint64_t>(destination) | static_cast<uint64_t>(row_bytes);
  if (alignment % 16 == 0)
    return move_rows<uint4>(source, source_rows, destination, destination_rows, rows, row_bytes, stream);
  if (alignment % 4 == 0)
    return move_rows<uint32_t>(source, source_rows, destination, destination_rows, rows, row_bytes, stream);
  return move_rows<uint8_t>(source, source_rows, destination, destination_rows, rows, row_bytes, stream);
}

// destination[i] = source[source_rows[i]] for i < rows, on a peer, once the word room of this GPU is at least room_value;
// then, unless arrived is null, the peer's word arrived becomes arrived_value. finished_blocks: a zero, and zero again
// afterwards.
int distca_push_rows(const void* source, const int64_t* source_rows, void* destination, int64_t rows,
                     int64_t row_bytes, const uint64_t* room, uint64_t room_value, uint64_t* arrived,
                     uint64_t arrived_value, unsigned int* finished_blocks, cudaStream_t stream) {
  const uint64_t alignment =
      reinterpret_cast<uint64_t>(source) | reinterpret_cast<uint64_t>(destination) | static_cast<uint64_t>(row_bytes);
  if (alignment % 16 == 0)
    return push_rows<uint4>(source, source_rows, destination, rows, row_bytes, room, room_value, arrived,
                            arrived_value, finished_blocks, stream);
  if (alignment % 4 == 0)
    return push_rows<uint32_t>(source, source_rows, destination, rows, row_bytes, room, room_value, arrived,
                               arrived_value, finished_blocks, stream);
  return push_rows<uint8_t>(source, source_rows, destination, rows, row_bytes, room, room_value, arrived,
                            arrived_value, finished_blocks, stream);
}

// destination[destination_rows[i]] += packed[copies[borders[i]]] + ... + packed[copies[borders[i + 1] - 1]], added in
// float32 in this order and rounded once. kind: 0 float32, 1 bfloat16, 2 float16; width in values, a row 16-byte aligned.
int distca_sum_rows(const void* packed, const int64_t* copies, const int64_t* borders,
                    const int64_t* destination_rows, void* destination, int64_t rows, int64_t width, int kind,
                    cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  if (kind == 0) return sum_rows<float>(packed, copies, borders, destination_rows, destination, rows, width, stream);
  if (kind == 1)
    return sum_rows<__nv_bfloat16>(packed, copies, borders, destination_rows, destination, rows, width, stream);
  return sum_rows<__half>(packed, copies, borders, destination_rows, destination, rows, width, stream);
}

// Raised whenever a function above changes; distca/transport/native.py expects its number.
int distca_interface() { return 1; }

const char* distca_error_name(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }

}  // extern "C"
