/* NVIDIA's management library for the pretended GPUs: how many there are, and how much of their memory processes hold. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include "memory.h"

static char handles[64];
static int number_of(const void *handle) { return (int)((const char *)handle - handles); }

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount(unsigned *count) { *count = pretended_gpus(); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = pretended_gpus(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { if ((int)index >= pretended_gpus()) return 2; *handle = handles + index; return 0; }
int nvmlDeviceGetHandleByUUID(const char *name, void **handle) { *handle = handles + atoi(name + 4); return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) { unsigned index = 0; sscanf(bus, "%*x:%x", &index); *handle = handles + index; return 0; }
int nvmlDeviceGetIndex(void *handle, unsigned *index) { *index = number_of(handle); return 0; }
int nvmlDeviceGetMinorNumber(void *handle, unsigned *number) { *number = number_of(handle); return 0; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { snprintf(text, size, "GPU-%08d-0000-0000-0000-000000000000", number_of(handle)); return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { snprintf(text, size, "pretended GPU"); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *total_free_used) {
  total_free_used[0] = PRETENDED_BYTES;
  total_free_used[2] = pretended_used(number_of(handle));
  total_free_used[1] = PRETENDED_BYTES - total_free_used[2];
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *device_memory) { device_memory[0] = 57; device_memory[1] = 3; return 0; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) { *degrees = 40; return 0; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { *milliwatts = 100000; return 0; }
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *processes) { *count = 0; return 0; }
int nvmlDeviceGetCpuAffinity(void *handle, unsigned size, unsigned long *set) { memset(set, 0xff, size * sizeof *set); return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.00"); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *info) { return 3; }
int nvmlDeviceGetGpuFabricInfoV(void *handle, void *info) { return 3; }
const char *nvmlErrorString(int error) { return "an error of the pretended NVML"; }
