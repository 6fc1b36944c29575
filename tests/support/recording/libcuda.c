/* A libcuda.so.1 without a device: it keeps each launch as a line of text.

   A line: kernel, grid, threads, shared memory, stream, number of launch attributes, then the bytes
   of each parameter in hexadecimal. A "cubin" is the sizes of a kernel's parameters, each a uint32,
   behind their number. Results are those of a driver on which all goes well, but for a tensor map
   that the driver's documentation forbids. */
#include "cuda.h"
#include "record.h"

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) {
  return *text = "refused", CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int index) { return *device = index, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) {
  /* Of what else is asked for, shared memory alone matters: that of sm_90. */
  return *value = what == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 : 232448, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  return cuCtxGetCurrent(context);
}
CUresult cuCtxGetLimit(size_t *value, CUlimit what) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit what, size_t value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction kernel, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction kernel, CUfunction_attribute what, int value) {
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute what, CUfunction kernel) {
  return *value = what == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction kernel, const CUlaunchConfig *config) {
  return *n = 1, CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  return *status = 0, CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute what, CUdeviceptr address) {
  return *(CUdeviceptr *)value = address, CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  size_t bytes = sizeof(uint32_t) * (1 + *(const uint32_t *)image);
  return *module = memcpy(malloc(bytes), image, bytes), CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { /* kernels of it may be launched yet */
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  struct kernel *kernel = malloc(sizeof *kernel);
  *kernel = (struct kernel){strdup(name), (uint32_t *)module};
  return *function = (CUfunction)kernel, CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if ((uintptr_t)address % 16 || rank < 1 || rank > 5)
    return CUDA_ERROR_INVALID_VALUE;
  uint64_t *words = memset(map, 0, sizeof *map);
  *words++ = (uint64_t)address;
  *words++ = type | (uint64_t)swizzle << 8 | (uint64_t)fill << 16 | (uint64_t)rank << 24;
  for (cuuint32_t i = 0; i < rank; i++) {
    if (i + 1 < rank && strides[i] % 16)
      return CUDA_ERROR_INVALID_VALUE;
    *words++ = sizes[i];
    *words++ = box[i] | (i + 1 < rank ? strides[i] << 16 : 0);
  }
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params,
                          void **extra) {
  const struct kernel *kernel = (const struct kernel *)function;
  if (!recording)
    return CUDA_SUCCESS;
  note("%s %u,%u,%u %u %u %llu %u", kernel->name, config->gridDimX, config->gridDimY,
       config->gridDimZ, config->blockDimX, config->sharedMemBytes,
       (unsigned long long)config->hStream, config->numAttrs);
  for (uint32_t i = 0; i < *kernel->sizes; i++) {
    note(" ");
    for (uint32_t byte = 0; byte < kernel->sizes[1 + i]; byte++)
      note("%02x", ((unsigned char *)params[i])[byte]);
  }
  note("\n");
  return CUDA_SUCCESS;
}
