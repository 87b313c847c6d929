/* A libnvidia-ml.so.1 with two GPUs for tests of the real ctypes path: GPU 0 is busy and answers everything, GPU 1
 * refuses what small or virtual GPUs refuse. FAKE_NVML=unloaded: a driver that is not loaded; =lost: GPU 1 fell off the
 * bus; =empty: a driver without a GPU. Layouts and codes follow nvml.h of CUDA 12. */
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
typedef struct { int number; } Device;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } Process;

static Device devices[2] = {{0}, {1}};
static const char *mode(void) { const char *m = getenv("FAKE_NVML"); return m ? m : ""; }
#define BUSY(device) ((device)->number == 0)
#define GIB (1ULL << 30)

int nvmlInitWithFlags(unsigned flags) { return strcmp(mode(), "unloaded") ? OK : DRIVER_NOT_LOADED; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return "Driver Not Loaded"; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { strncpy(out, "570.86.15", n); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 12080; return OK; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = strcmp(mode(), "empty") ? 2 : 0; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    if (index == 1 && !strcmp(mode(), "lost")) return GPU_IS_LOST;
    *out = &devices[index];
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device **out) {
    *out = &devices[!!strcmp(uuid, "GPU-aaaa")];
    return strcmp(uuid, "GPU-aaaa") && strcmp(uuid, "GPU-bbbb") ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetIndex(Device *d, unsigned *out) { *out = d->number; return OK; }
int nvmlDeviceGetUUID(Device *d, char *out, unsigned n) { strncpy(out, BUSY(d) ? "GPU-aaaa" : "GPU-bbbb", n); return OK; }
int nvmlDeviceGetName(Device *d, char *out, unsigned n) { strncpy(out, BUSY(d) ? "NVIDIA H100" : "NVIDIA T4", n); return OK; }
int nvmlDeviceGetPciInfo_v3(Device *d, Pci *out) {
    memset(out, 0, sizeof *out);
    strcpy(out->bus_id, BUSY(d) ? "00000000:0B:00.0" : "00000000:0C:00.0");
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(Device *d, MemoryV2 *out) {
    if (!BUSY(d)) return NOT_SUPPORTED;
    out->total = 80 * GIB; out->reserved = GIB; out->used = 20 * GIB; out->free = 59 * GIB;
    return OK;
}
int nvmlDeviceGetMemoryInfo(Device *d, Memory *out) { out->total = 15 * GIB; out->used = GIB / 4; out->free = 14 * GIB; return OK; }
int nvmlDeviceGetUtilizationRates(Device *d, Utilization *out) {
    if (!BUSY(d)) return NOT_SUPPORTED;
    out->gpu = 97; out->memory = 40;
    return OK;
}
#define NUMBER(name, value) int name(Device *d, unsigned *out) { if (!BUSY(d)) return NOT_SUPPORTED; *out = value; return OK; }
#define KIND(name, value) int name(Device *d, unsigned kind, unsigned *out) { if (!BUSY(d)) return NOT_SUPPORTED; *out = value; return OK; }
NUMBER(nvmlDeviceGetPowerUsage, 412345)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, 700000)
NUMBER(nvmlDeviceGetComputeMode, 0)
KIND(nvmlDeviceGetTemperature, 61)
KIND(nvmlDeviceGetClockInfo, kind == 1 ? 1755 : 1)
KIND(nvmlDeviceGetMaxClockInfo, kind == 1 ? 1980 : 1)
int nvmlDeviceGetCudaComputeCapability(Device *d, int *major, int *minor) {
    *major = BUSY(d) ? 9 : 7; *minor = BUSY(d) ? 0 : 5;
    return OK;
}
int nvmlDeviceGetMigMode(Device *d, unsigned *now, unsigned *pending) { *now = *pending = 0; return BUSY(d) ? OK : NOT_SUPPORTED; }
/* Only the older name of the query, as drivers before 535 have it. */
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *d, unsigned long long *out) { *out = BUSY(d) ? 0x24 : 0x1; return OK; }
int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *count, Process *out) {
    if (!BUSY(d)) { *count = 0; return OK; }
    if (*count < 2) { *count = 2; return INSUFFICIENT_SIZE; }
    const char *pid = getenv("FAKE_NVML_PID");
    out[0] = (Process){pid ? atoi(pid) : 1, 19 * GIB, 0, 0};
    out[1] = (Process){4194305, ~0ULL, 0, 0};
    *count = 2;
    return OK;
}
// As of a process that computes and draws: it is in both lists.
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *d, unsigned *count, Process *out) {
    return nvmlDeviceGetComputeRunningProcesses_v3(d, count, out);
}
