/* A libamdhip64.so without a device: it keeps each launch as a line of text, as libcuda.c does.

   A line: kernel, grid, threads, shared memory, stream, number of launch attributes, then the bytes
   of each parameter in hexadecimal. A "code object" is the sizes of a kernel's parameters, each a
   uint32, behind their number. Results are those of a runtime on which all goes well. */
#define __HIP_PLATFORM_AMD__
#include <hip/hip_runtime_api.h>
#include "record.h"

hipError_t hipDriverGetVersion(int *version) { return *version = 70000000, hipSuccess; }
static const char *last_error(void) { return "none"; }
static const char *error_string(hipError_t error) { return "refused"; }
static hipError_t properties_of(hipDeviceProp_t *properties, int device) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->gcnArchName, ARCH ":sramecc+:xnack-");
  properties->sharedMemPerBlock = 65536;
  properties->multiProcessorCount = UNITS;
  properties->warpSize = LANES;
  return hipSuccess;
}
static hipError_t load(hipModule_t *module, const void *image, unsigned count,
                       hipJitOption *options, void **values) {
  size_t bytes = sizeof(uint32_t) * (1 + *(const uint32_t *)image);
  return *module = memcpy(malloc(bytes), image, bytes), hipSuccess;
}
static hipError_t function_of(hipFunction_t *function, hipModule_t module, const char *name) {
  struct kernel *kernel = malloc(sizeof *kernel);
  *kernel = (struct kernel){strdup(name), (uint32_t *)module};
  return *function = (hipFunction_t)kernel, hipSuccess;
}
static hipError_t attribute_of(int *value, hipFunction_attribute what, hipFunction_t function) {
  return *value = what == HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, hipSuccess;
}
static hipError_t pointer_of(void *value, hipPointer_attribute what, hipDeviceptr_t address) {
  return *(hipDeviceptr_t *)value = address, hipSuccess;
}
static hipError_t launch(hipFunction_t function, unsigned x, unsigned y, unsigned z,
                         unsigned threads, unsigned threads_y, unsigned threads_z, unsigned shared,
                         hipStream_t stream, void **params, void **extra) {
  const struct kernel *kernel = (const struct kernel *)function;
  if (!recording)
    return hipSuccess;
  note("%s %u,%u,%u %u %u %llu 0", kernel->name, x, y, z, threads, shared,
       (unsigned long long)stream);
  for (uint32_t i = 0; i < *kernel->sizes; i++) {
    note(" ");
    for (uint32_t byte = 0; byte < kernel->sizes[1 + i]; byte++)
      note("%02x", ((unsigned char *)params[i])[byte]);
  }
  note("\n");
  return hipSuccess;
}
static hipError_t unexpected(void) { return hipErrorNotSupported; }

hipError_t hipGetProcAddress(const char *symbol, void **function, int version, uint64_t flags,
                             hipDriverProcAddressQueryResult *status) {
  static const struct {
    const char *name;
    void *function;
  } known[] = {
      {"hipGetLastError", last_error},        {"hipGetErrorString", error_string},
      {"hipGetDeviceProperties", properties_of}, {"hipModuleLoadDataEx", load},
      {"hipModuleGetFunction", function_of},  {"hipFuncGetAttribute", attribute_of},
      {"hipPointerGetAttribute", pointer_of}, {"hipModuleLaunchKernel", launch},
  };
  *function = unexpected;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (!strcmp(symbol, known[i].name))
      *function = known[i].function;
  return hipSuccess;
}
