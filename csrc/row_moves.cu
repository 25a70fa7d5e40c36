// Moves rows of tensors between GPUs of one node with their copy engines, and inside one GPU with two small kernels.
//
// A plain C interface over raw addresses, called through ctypes (distca/transport/cuda_ops.py): no headers of torch or
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
constexpr int kMostOperations = 128;  // cuStreamBatchMemOp takes fewer than 256 at once
// What one launch can push; its table must fit into 4 KiB of kernel arguments.
constexpr int kMostPushed = 64;
constexpr int kMostArrivals = 64;

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

// Rows of one tensor for one peer, where they follow each other.
struct Pushed {
  const char* source;
  const int64_t* source_rows;
  char* destination;
  int64_t begin;  // how many rows of the table come before
  int row_bytes;
  int unit;  // 16, 4 or 1: the bytes in which all of it is aligned
};

struct PushTable {
  Pushed pushed[kMostPushed];
  uint64_t* arrived[kMostArrivals];  // signal slots of peers
  uint64_t value;                    // what they get when the rows are there
  int64_t rows;
  int count;
  int arrivals;
};

// Writes rows into peers' memory and says that they arrived: one launch for all that is too small to be worth a copy
// engine's start. The last block to finish gives the signals.
__global__ void push_rows_kernel(const __grid_constant__ PushTable table, unsigned int* finished_blocks) {
  const int lane = threadIdx.x % 32;
  const int64_t stride = int64_t{gridDim.x} * kWarpsPerBlock;
  int k = 0;
  for (int64_t i = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / 32; i < table.rows; i += stride) {
    while (k + 1 < table.count && i >= table.pushed[k + 1].begin) ++k;
    const Pushed& piece = table.pushed[k];
    const int64_t row = i - piece.begin;
    const char* from = piece.source + piece.source_rows[row] * piece.row_bytes;
    char* to = piece.destination + row * piece.row_bytes;
    if (piece.unit == 16)
      move_row(reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to), piece.row_bytes / 16, lane);
    else if (piece.unit == 4)
      move_row(reinterpret_cast<const uint32_t*>(from), reinterpret_cast<uint32_t*>(to), piece.row_bytes / 4, lane);
    else
      move_row(from, to, piece.row_bytes, lane);
  }
  __threadfence_system();
  if (table.arrivals == 0) return;
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(finished_blocks, 1) == gridDim.x - 1) {
    *finished_blocks = 0;
    __threadfence_system();
    for (int peer = 0; peer < table.arrivals; ++peer)
      asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(table.arrived[peer]), "l"(table.value) : "memory");
  }
}

// The widest unit in which addresses and row widths of these bits are aligned.
int unit_of(uint64_t bits) { return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1; }

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

template <typename Value>
int sum_rows(const void* packed, const int64_t* copies, const int64_t* borders, const int64_t* destination_rows,
             void* destination, int64_t rows, int64_t width, cudaStream_t stream) {
  sum_rows_kernel<<<blocks_for(rows), 32 * kWarpsPerBlock, 0, stream>>>(
      static_cast<const Value*>(packed), copies, borders, destination_rows, static_cast<Value*>(destination), rows,
      static_cast<int>(width));
  return cudaGetLastError();
}

// A driver function by name, so that the library loads where there is no driver; null if the driver has none.
template <typename Function>
Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  return reinterpret_cast<Function>(found);
}

CUresult batch_memory_operations(CUstream stream, std::vector<CUstreamBatchMemOpParams>& operations) {
  static auto function =
      driver_function<CUresult (*)(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int)>(
          "cuStreamBatchMemOp");
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

// Copies row ranges with the copy engines. pieces: [count][5] address of the first source row, address of the first
// destination row, address of [ranges][3] (source row, destination row, rows), ranges, bytes of a row. Batched: in one
// call, in no given order, by as many engines as the driver sees fit, and also inside this GPU not by a kernel; else one
// copy after the other.
int distca_copy_rows(const int64_t* pieces, int64_t count, int batched, cudaStream_t stream) {
  std::vector<const void*> from;
  std::vector<void*> to;
  std::vector<size_t> bytes;
  for (int64_t k = 0; k < count; ++k) {
    const int64_t* piece = pieces + 5 * k;
    const int64_t* ranges = reinterpret_cast<const int64_t*>(piece[2]);
    for (int64_t i = 0; i < piece[3]; ++i) {
      if (ranges[3 * i + 2] == 0) continue;
      from.push_back(reinterpret_cast<const char*>(piece[0]) + ranges[3 * i] * piece[4]);
      to.push_back(reinterpret_cast<char*>(piece[1]) + ranges[3 * i + 1] * piece[4]);
      bytes.push_back(ranges[3 * i + 2] * piece[4]);
    }
  }
  if (from.empty()) return cudaSuccess;
#if CUDART_VERSION >= 13000
  if (batched) {
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;
    return cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), from.size(), &attributes, &first, 1, stream);
  }
#endif
  for (size_t i = 0; i < from.size(); ++i) {
    cudaError_t error = cudaMemcpyAsync(to[i], from[i], bytes[i], cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// A stream that no other library uses, so that its waits hold up nobody else's work. Never destroyed.
int distca_create_stream(int priority, cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, priority);
}

// Whether streams of the current GPU can write and wait for 64-bit words.
int distca_can_signal() {
  static auto device_of =
      driver_function<CUresult (*)(CUdevice*, int)>("cuDeviceGet");
  static auto attribute_of =
      driver_function<CUresult (*)(int*, CUdevice_attribute, CUdevice)>("cuDeviceGetAttribute");
  int index = 0, can = 0;
  CUdevice device;
  if (!device_of || !attribute_of || cudaGetDevice(&index) != cudaSuccess) return 0;
  if (device_of(&device, index) != CUDA_SUCCESS) return 0;
  if (attribute_of(&can, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device) != CUDA_SUCCESS) return 0;
  return can;
}

// Writes value to 64-bit signal slots, on this GPU or a peer, after all earlier work of the stream is visible there.
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

// Holds the stream (not the host, and no multiprocessor) until every signal slot of this GPU is at least value.
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
  const int unit = unit_of(reinterpret_cast<uint64_t>(source) | reinterpret_cast<uint64_t>(destination) |
                           static_cast<uint64_t>(row_bytes));
  if (unit == 16)
    return move_rows<uint4>(source, source_rows, destination, destination_rows, rows, row_bytes, stream);
  if (unit == 4)
    return move_rows<uint32_t>(source, source_rows, destination, destination_rows, rows, row_bytes, stream);
  return move_rows<uint8_t>(source, source_rows, destination, destination_rows, rows, row_bytes, stream);
}

// Writes rows into peers' memory by a kernel of at most so many blocks, then value to signal slots. pieces: [count][5]
// address of the source, address of [rows] its rows to write, address at which they follow each other, rows, bytes of a
// row. finished_blocks: a zero that only this stream uses, and zero again afterwards.
int distca_push_rows(const int64_t* pieces, int64_t count, uint64_t* const* arrived, int64_t arrivals, uint64_t value,
                     unsigned int* finished_blocks, int most_blocks, cudaStream_t stream) {
  // Usually one launch. If there are more, the last ones signal: by then the rows of those before are there.
  for (int64_t piece = 0, arrival = 0; piece < count || arrival < arrivals;) {
    PushTable table = {};
    for (; piece < count && table.count < kMostPushed; ++piece) {
      const int64_t* p = pieces + 5 * piece;
      Pushed& pushed = table.pushed[table.count++];
      pushed.source = reinterpret_cast<const char*>(p[0]);
      pushed.source_rows = reinterpret_cast<const int64_t*>(p[1]);
      pushed.destination = reinterpret_cast<char*>(p[2]);
      pushed.begin = table.rows;
      pushed.row_bytes = static_cast<int>(p[4]);
      pushed.unit = unit_of(static_cast<uint64_t>(p[0] | p[2] | p[4]));
      table.rows += p[3];
    }
    if (piece == count) {
      for (; arrival < arrivals && table.arrivals < kMostArrivals; ++arrival)
        table.arrived[table.arrivals++] = arrived[arrival];
    }
    table.value = value;
    int blocks = std::max(1, std::min(blocks_for(table.rows), most_blocks));
    push_rows_kernel<<<blocks, 32 * kWarpsPerBlock, 0, stream>>>(table, finished_blocks);
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
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

// Raised whenever a function above changes; distca/transport/cuda_ops.py expects its number.
int distca_interface() { return 2; }

const char* distca_error_name(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }

}  // extern "C"
