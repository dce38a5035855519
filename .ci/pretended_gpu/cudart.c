/* A CUDA runtime for a machine without a GPU: device memory is host memory, and torch's kernels are computed by operators.py.
 *
 * A stream is a queue of copies, events and waits that runs as late as CUDA allows: when the host, an operator or another stream
 * waits for it. What lacks such a wait reads old numbers here every time, where a GPU gives them now and then. Times are those of
 * a device that copies 50 GB a second. GPUs are as many as PRETENDED_GPUS says, of 80 GiB each; what processes hold of them is
 * counted in a file that all processes of a user share. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
/* what NVIDIA's compiler says of functions and types, which is nothing to another one */
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDART_CB
#define __host__
#define __device__
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
#define __align__(bytes) __attribute__((aligned(bytes)))
#include "driver_types.h"
#include "memory.h"

typedef cudaError_t Error;
typedef enum cudaMemcpyKind Kind;
#define OK cudaSuccess
#define EXPORT __attribute__((visibility("default")))
#define MOST_GPUS 16

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static __thread Error last_error = OK;
static __thread int current_device = 0;
static __thread int capture_mode = 0;
static pid_t owner = 0;
static int capturing = 0;

static Error failed(Error error) { return last_error = error; }

/* ------------------------------------------------------------------------------------------------------------ devices */

/* The physical number of a visible device; -1 where there is no such. CUDA reads names up to the first that is no GPU. */
static int physical(int device) {
  const char *shown = getenv("CUDA_VISIBLE_DEVICES");
  int all = pretended_gpus(), count = 0;
  if (!shown) return device < all ? device : -1;
  char names[256];
  snprintf(names, sizeof names, "%s", shown);
  for (char *next = names, *name; (name = strsep(&next, ","));) {
    int number = !strncmp(name, "GPU-", 4) ? atoi(name + 4) : *name >= '0' && *name <= '9' ? atoi(name) : all;
    if (number >= all) return -1;
    if (count++ == device) return number;
  }
  return -1;
}

static int device_count(void) {
  int count = 0;
  while (count < MOST_GPUS && physical(count) >= 0) count++;
  return count;
}

/* What every call that needs a device does first: CUDA can't be used in a process that was forked from one that uses it. */
static Error awake(void) {
  if (!device_count()) return failed(cudaErrorNoDevice);
  if (!owner) owner = getpid();
  return owner == getpid() ? OK : failed(cudaErrorInitializationError);
}
#define AWAKE do { Error error_ = awake(); if (error_) return error_; } while (0)
/* Some calls break a capture off that runs in the process, unless their thread says that they do no harm. */
#define NOT_CAPTURED do { if (capturing && !capture_mode) return failed(cudaErrorStreamCaptureUnsupported); } while (0)

EXPORT int pretended_is_awake(void) { return owner == getpid(); }
EXPORT Error cudaGetDeviceCount(int *count) { AWAKE; *count = device_count(); return OK; }
EXPORT Error cudaSetDevice(int device) {
  AWAKE;
  if (device < 0 || physical(device) < 0) return failed(cudaErrorInvalidDevice);
  current_device = device;
  pretended_memory(physical(device));
  return OK;
}
EXPORT Error cudaGetDevice(int *device) { if (!device_count()) return failed(cudaErrorNoDevice); *device = current_device; return OK; }
EXPORT Error cudaGetDeviceProperties(struct cudaDeviceProp *all, int device) {
  AWAKE;
  memset(all, 0, sizeof *all);
  strcpy(all->name, "pretended GPU");
  all->totalGlobalMem = PRETENDED_BYTES; all->sharedMemPerBlock = 49152; all->regsPerBlock = 65536; all->warpSize = 32;
  all->memPitch = 2147483647; all->maxThreadsPerBlock = 1024; all->maxThreadsDim[0] = all->maxThreadsDim[1] = 1024;
  all->maxThreadsDim[2] = 64; all->maxGridSize[0] = 2147483647; all->maxGridSize[1] = all->maxGridSize[2] = 65535;
  all->totalConstMem = 65536; all->major = 9; all->minor = 0; all->textureAlignment = 512; all->multiProcessorCount = 132;
  all->canMapHostMemory = 1; all->concurrentKernels = 1; all->pciBusID = physical(device); all->asyncEngineCount = 3;
  all->unifiedAddressing = 1; all->l2CacheSize = 50 << 20; all->maxThreadsPerMultiProcessor = 2048;
  all->sharedMemPerMultiprocessor = 233472; all->regsPerMultiprocessor = 65536; all->cooperativeLaunch = 1;
  all->sharedMemPerBlockOptin = 232448; all->maxBlocksPerMultiProcessor = 32;
  return OK;
}
EXPORT Error cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrMultiProcessorCount ? 132
         : attribute == cudaDevAttrWarpSize ? 32 : 0;
  return OK;
}
EXPORT Error cudaDriverGetVersion(int *version) { *version = 13000; return OK; }
EXPORT Error cudaRuntimeGetVersion(int *version) { *version = 13000; return OK; }
EXPORT Error cudaDeviceGetPCIBusId(char *text, int size, int device) { snprintf(text, size, "0000:%02x:00.0", device); return OK; }
EXPORT Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { AWAKE; *least = 0; *greatest = -5; return OK; }
EXPORT Error cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return OK; }
EXPORT Error cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return OK; }
EXPORT Error cudaGetLastError(void) { Error error = last_error; last_error = OK; return error; }
EXPORT Error cudaPeekAtLastError(void) { return last_error; }
EXPORT const char *cudaGetErrorName(Error error) { return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError"; }
EXPORT const char *cudaGetErrorString(Error error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorNotSupported: return "the pretended CUDA does not compute this";
    default: return "an error of the pretended CUDA";
  }
}

/* ------------------------------------------------------------------------------------------------------------ streams */

struct event { unsigned long recorded, happened; double at; int captured, is_destroyed, waiting; struct stream *stream; };
enum what { COPY, FILL, RECORD, WAIT };
struct action { enum what what; void *to; const void *from; size_t size; int value; struct event *event; unsigned long number; struct stream *stream; int frees; struct action *next; };
struct stream { double busy; int priority, capture; struct action *first, **end; struct stream *next; };
static struct stream *streams = 0, *default_streams[MOST_GPUS];

static double now(void) { struct timespec time; clock_gettime(CLOCK_MONOTONIC, &time); return time.tv_sec + 1e-9 * time.tv_nsec; }
static void sleep_until(double then) {
  for (double left; (left = then - now()) > 0;) { struct timespec time = {(time_t)left, (long)((left - (time_t)left) * 1e9)}; nanosleep(&time, 0); }
}
static double latest(double a, double b) { return a > b ? a : b; }

static struct stream *made(int priority) {
  struct stream *stream = calloc(1, sizeof *stream);
  stream->priority = priority;
  stream->end = &stream->first;
  stream->next = streams;
  return streams = stream;
}
static struct stream *stream_of(cudaStream_t handle) {
  if ((uintptr_t)handle > 2) return (struct stream *)handle;
  if (!default_streams[current_device]) default_streams[current_device] = made(0);
  return default_streams[current_device];
}
static void queue(struct stream *stream, struct action action, double seconds) {
  struct action *kept = malloc(sizeof *kept);
  *kept = action;
  kept->next = 0;
  *stream->end = kept;
  stream->end = &kept->next;
  stream->busy = latest(stream->busy, now()) + seconds;
}
static void forget(struct event *event) { if (!--event->waiting && event->is_destroyed) free(event); }
/* Run what a stream has before it, all of it or until an event has happened. */
static void run(struct stream *stream, struct event *event, unsigned long number) {
  while (stream->first && !(event && event->happened >= number)) {
    struct action *next = stream->first;
    if (!(stream->first = next->next)) stream->end = &stream->first;
    if (next->what == COPY) { memmove(next->to, next->from, next->size); if (next->frees) free((void *)next->from); }
    if (next->what == FILL) memset(next->to, next->value, next->size);
    if (next->what == RECORD) next->event->happened = next->number;
    if (next->what == WAIT && next->event->happened < next->number) run(next->stream, next->event, next->number);
    if (next->event) forget(next->event);
    free(next);
  }
}
static void run_all(void) { for (struct stream *stream = streams; stream; stream = stream->next) run(stream, 0, 0); }
static double wait_for(struct stream *stream) { pthread_mutex_lock(&lock); run(stream, 0, 0); double busy = stream->busy; pthread_mutex_unlock(&lock); return busy; }

/* For operators.py and nccl.c: all that an operator in this stream comes after has run; the number of the capture, or 0. */
EXPORT int pretended_begin(cudaStream_t handle) { struct stream *stream = stream_of(handle); wait_for(stream); return stream->capture; }
EXPORT void pretended_busy(cudaStream_t handle, double seconds) {
  pthread_mutex_lock(&lock);
  struct stream *stream = stream_of(handle);
  stream->busy = latest(stream->busy, now()) + seconds;
  pthread_mutex_unlock(&lock);
}
/* A copy whose source the stream frees. */
EXPORT void pretended_deliver(cudaStream_t handle, void *to, void *from, size_t size) {
  pthread_mutex_lock(&lock);
  queue(stream_of(handle), (struct action){COPY, to, from, size, .frees = 1}, 20e-6 + size / 50e9);
  pthread_mutex_unlock(&lock);
}

static Error new_stream(cudaStream_t *stream, int priority) { AWAKE; pthread_mutex_lock(&lock); *stream = (cudaStream_t)made(priority); pthread_mutex_unlock(&lock); return OK; }
EXPORT Error cudaStreamCreate(cudaStream_t *stream) { return new_stream(stream, 0); }
EXPORT Error cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { return new_stream(stream, priority); }
EXPORT Error cudaStreamDestroy(cudaStream_t stream) { wait_for(stream_of(stream)); return OK; }
EXPORT Error cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = stream_of(stream)->priority; return OK; }
EXPORT Error cudaStreamQuery(cudaStream_t handle) {
  AWAKE; NOT_CAPTURED;
  if (stream_of(handle)->busy > now()) return cudaErrorNotReady;
  wait_for(stream_of(handle));
  return OK;
}
EXPORT Error cudaStreamSynchronize(cudaStream_t handle) { AWAKE; NOT_CAPTURED; sleep_until(wait_for(stream_of(handle))); return OK; }
EXPORT Error cudaDeviceSynchronize(void) {
  AWAKE; NOT_CAPTURED;
  pthread_mutex_lock(&lock);
  run_all();
  double until = 0;
  for (struct stream *stream = streams; stream; stream = stream->next) until = latest(until, stream->busy);
  pthread_mutex_unlock(&lock);
  sleep_until(until);
  return OK;
}
EXPORT Error cudaStreamAddCallback(cudaStream_t stream, void (*call)(cudaStream_t, Error, void *), void *data, unsigned flags) { wait_for(stream_of(stream)); call(stream, OK, data); return OK; }
EXPORT Error cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) { wait_for(stream_of(stream)); call(data); return OK; }

/* ------------------------------------------------------------------------------------------------------------- events */

EXPORT Error cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { AWAKE; *event = calloc(1, sizeof(struct event)); return OK; }
EXPORT Error cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT Error cudaEventDestroy(cudaEvent_t handle) {
  struct event *event = (struct event *)handle;
  pthread_mutex_lock(&lock);
  event->is_destroyed = 1;
  if (!event->waiting) free(event);
  pthread_mutex_unlock(&lock);
  return OK;
}
EXPORT Error cudaEventRecord(cudaEvent_t handle, cudaStream_t at) {
  struct event *event = (struct event *)handle;
  pthread_mutex_lock(&lock);
  struct stream *stream = stream_of(at);
  event->waiting++;
  event->stream = stream;
  queue(stream, (struct action){RECORD, .event = event, .number = ++event->recorded}, 0);
  event->at = stream->busy;
  event->captured = stream->capture;
  pthread_mutex_unlock(&lock);
  return OK;
}
EXPORT Error cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
static Error happens(struct event *event) {
  if (event->captured) return failed(cudaErrorCapturedEvent);
  pthread_mutex_lock(&lock);
  if (event->happened < event->recorded) run(event->stream, event, event->recorded);
  pthread_mutex_unlock(&lock);
  return OK;
}
EXPORT Error cudaEventQuery(cudaEvent_t handle) {
  struct event *event = (struct event *)handle;
  NOT_CAPTURED;
  if (!event->captured && event->at > now()) return cudaErrorNotReady;
  return happens(event);
}
EXPORT Error cudaEventSynchronize(cudaEvent_t handle) {
  NOT_CAPTURED;
  Error error = happens((struct event *)handle);
  if (!error) sleep_until(((struct event *)handle)->at);
  return error;
}
EXPORT Error cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  struct event *first = (struct event *)begin, *last = (struct event *)end;
  if (!first->recorded || !last->recorded) return failed(cudaErrorInvalidResourceHandle);
  if (first->captured || last->captured) return failed(cudaErrorCapturedEvent);
  if (first->at > now() || last->at > now()) return cudaErrorNotReady;
  *milliseconds = (float)(1e3 * (last->at - first->at));
  return OK;
}
EXPORT Error cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t waited, unsigned flags) {
  struct event *event = (struct event *)waited;
  if (!event->recorded) return OK;
  pthread_mutex_lock(&lock);
  struct stream *stream = stream_of(handle);
  event->waiting++;
  queue(stream, (struct action){WAIT, .event = event, .number = event->recorded, .stream = event->stream}, 0);
  stream->busy = latest(stream->busy, event->at);
  if (event->captured) stream->capture = event->captured;
  pthread_mutex_unlock(&lock);
  return OK;
}

/* ------------------------------------------------------------------------------------------------------------- memory */

struct block { char *begin; size_t size; enum cudaMemoryType type; int device; struct block *next; };
static struct block *blocks = 0;

static Error hold(void **found, size_t size, enum cudaMemoryType type) {
  AWAKE;
  if (type == cudaMemoryTypeDevice) {
    NOT_CAPTURED;
    if (size > PRETENDED_BYTES || pretended_used(physical(current_device)) + size > PRETENDED_BYTES) return failed(cudaErrorMemoryAllocation);
  }
  struct block *block = malloc(sizeof *block);
  *block = (struct block){0, size, type, current_device, 0};
  if (posix_memalign((void **)&block->begin, 4096, size ? size : 1)) { free(block); return failed(cudaErrorMemoryAllocation); }
  pthread_mutex_lock(&lock);
  block->next = blocks;
  blocks = block;
  if (type == cudaMemoryTypeDevice) pretended_memory(physical(current_device))->bytes += size;
  pthread_mutex_unlock(&lock);
  *found = block->begin;
  return OK;
}
static Error release(void *begin, int frees) {
  if (!begin) return OK;
  pthread_mutex_lock(&lock);
  run_all(); /* what streams still do with it comes first, as CUDA has it */
  for (struct block **link = &blocks, *block; (block = *link); link = &block->next) {
    if (block->begin != begin) continue;
    *link = block->next;
    if (block->type == cudaMemoryTypeDevice) pretended_memory(physical(block->device))->bytes -= block->size;
    pthread_mutex_unlock(&lock);
    if (frees) free(begin);
    free(block);
    return OK;
  }
  pthread_mutex_unlock(&lock);
  return failed(cudaErrorInvalidValue);
}
static struct block block_at(const void *at) {
  struct block found = {0};
  pthread_mutex_lock(&lock);
  for (struct block *block = blocks; block; block = block->next)
    if ((char *)at >= block->begin && (char *)at < block->begin + (block->size ? block->size : 1)) { found = *block; break; }
  pthread_mutex_unlock(&lock);
  return found;
}
EXPORT Error cudaMalloc(void **found, size_t size) { return hold(found, size, cudaMemoryTypeDevice); }
EXPORT Error cudaMallocAsync(void **found, size_t size, cudaStream_t stream) { return hold(found, size, cudaMemoryTypeDevice); }
EXPORT Error cudaHostAlloc(void **found, size_t size, unsigned flags) { return hold(found, size, cudaMemoryTypeHost); }
EXPORT Error cudaFree(void *begin) { return release(begin, 1); }
EXPORT Error cudaFreeAsync(void *begin, cudaStream_t stream) { return release(begin, 1); }
EXPORT Error cudaFreeHost(void *begin) { return release(begin, 1); }
EXPORT Error cudaHostUnregister(void *begin) { return release(begin, 0); }
EXPORT Error cudaHostRegister(void *begin, size_t size, unsigned flags) {
  AWAKE;
  struct block *block = malloc(sizeof *block);
  pthread_mutex_lock(&lock);
  *block = (struct block){begin, size, cudaMemoryTypeHost, current_device, blocks};
  blocks = block;
  pthread_mutex_unlock(&lock);
  return OK;
}
EXPORT Error cudaPointerGetAttributes(struct cudaPointerAttributes *all, const void *at) {
  struct block block = block_at(at);
  memset(all, 0, sizeof *all);
  all->type = block.type;
  all->device = block.device;
  if (block.type == cudaMemoryTypeDevice) all->devicePointer = (void *)at;
  if (block.type) all->hostPointer = (void *)at;
  return OK;
}
EXPORT Error cudaMemGetInfo(size_t *left, size_t *total) { AWAKE; *total = PRETENDED_BYTES; *left = PRETENDED_BYTES - pretended_used(physical(current_device)); return OK; }
EXPORT Error cudaMemcpyAsync(void *to, const void *from, size_t size, Kind kind, cudaStream_t handle) {
  AWAKE;
  if (block_at(to).type && block_at(from).type) {
    pthread_mutex_lock(&lock);
    queue(stream_of(handle), (struct action){COPY, to, from, size}, 5e-6 + size / 50e9);
    pthread_mutex_unlock(&lock);
  } else { /* host memory that is not locked: the host waits */
    sleep_until(wait_for(stream_of(handle)));
    memmove(to, from, size);
  }
  return OK;
}
EXPORT Error cudaMemcpy(void *to, const void *from, size_t size, Kind kind) { AWAKE; NOT_CAPTURED; sleep_until(wait_for(stream_of(0))); memmove(to, from, size); return OK; }
EXPORT Error cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, cudaStream_t stream) { return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream); }
EXPORT Error cudaMemcpy2DAsync(void *to, size_t step, const void *from, size_t stride, size_t width, size_t height, Kind kind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++) { Error error = cudaMemcpyAsync((char *)to + row * step, (char *)from + row * stride, width, kind, stream); if (error) return error; }
  return OK;
}
EXPORT Error cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t handle) {
  AWAKE;
  pthread_mutex_lock(&lock);
  queue(stream_of(handle), (struct action){FILL, to, .size = size, .value = value}, 5e-6);
  pthread_mutex_unlock(&lock);
  return OK;
}
EXPORT Error cudaMemset(void *to, int value, size_t size) { AWAKE; wait_for(stream_of(0)); memset(to, value, size); return OK; }
EXPORT Error cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, Kind kind) { return OK; }
EXPORT Error cudaGetSymbolAddress(void **found, const void *symbol) { static char zeros[1 << 16]; *found = zeros; return OK; }

/* ------------------------------------------------------------------------------------------------------------- graphs */

/* What an operator does in a capture is kept by operators.py, which does it again for each launch of the graph. */
static void (*replay)(int) = 0;
EXPORT void pretended_on_graph(void (*call)(int)) { replay = call; }
EXPORT Error cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  static int number = 0;
  AWAKE;
  stream_of(stream)->capture = ++number;
  capturing += mode == cudaStreamCaptureModeGlobal;
  return OK;
}
EXPORT Error cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
  int number = stream_of(handle)->capture;
  for (struct stream *stream = streams; stream; stream = stream->next) if (stream->capture == number) stream->capture = 0;
  if (capturing) capturing--;
  *graph = (cudaGraph_t)(intptr_t)number;
  return OK;
}
EXPORT Error cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { *status = stream_of(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone; return OK; }
EXPORT Error cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *number, cudaGraph_t *graph, const void *nodes, const void *edges, size_t *count) {
  cudaStreamIsCapturing(stream, status);
  if (number) *number = stream_of(stream)->capture;
  if (graph) *graph = (cudaGraph_t)(intptr_t)stream_of(stream)->capture;
  if (count) *count = 0;
  return OK;
}
EXPORT Error cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { int former = capture_mode; capture_mode = *mode; *mode = former; return OK; }
EXPORT Error cudaGraphInstantiateWithFlags(cudaGraphExec_t *made_of, cudaGraph_t graph, unsigned long long flags) { *made_of = (cudaGraphExec_t)graph; return OK; }
EXPORT Error cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) { wait_for(stream_of(stream)); if (replay) replay((int)(intptr_t)graph); return OK; }
EXPORT Error cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { *count = 1; return OK; }
EXPORT Error cudaGraphDestroy(cudaGraph_t graph) { return OK; }
EXPORT Error cudaGraphExecDestroy(cudaGraphExec_t graph) { return OK; }

/* ------------------------------------------------------------------------------------------------------------ kernels */

/* torch's kernels are computed as operators; one that gets here would be left out in silence. */
#define NAMES 65536
static struct { const void *function; const char *name; } names[NAMES];
static size_t place_of(const void *function) {
  size_t place = ((uintptr_t)function >> 4) % NAMES;
  while (names[place].function && names[place].function != function) place = (place + 1) % NAMES;
  return place;
}
EXPORT void __cudaRegisterFunction(void **module, const char *function, char *device, const char *name, int limit, void *a, void *b, void *c, void *d, int *e) {
  size_t place = place_of(function);
  names[place].function = function;
  names[place].name = name;
}
static Error not_computed(const void *function) {
  AWAKE;
  const char *name = names[place_of(function)].name;
  fprintf(stderr, "the pretended CUDA does not compute the kernel %.200s\n", name ? name : "without a name");
  return failed(cudaErrorNotSupported);
}
static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  configuration.grid = grid; configuration.block = block; configuration.shared = shared; configuration.stream = stream;
  return 0;
}
EXPORT Error __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid; *block = configuration.block; *shared = configuration.shared; *(void **)stream = configuration.stream;
  return OK;
}
EXPORT Error cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) { return not_computed(function); }
EXPORT Error __cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) { return not_computed(function); }
EXPORT Error cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) { return not_computed(function); }
EXPORT Error cudaLaunchKernelExC(const void *configured, const void *function, void **arguments) { return not_computed(function); }
EXPORT Error __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return OK; }
EXPORT char __cudaInitModule(void **module) { return 1; }
EXPORT void **__cudaRegisterFatBinary(void *data) { static void *module[8]; return module; }
EXPORT void __cudaRegisterFatBinaryEnd(void **module) {}
EXPORT void __cudaUnregisterFatBinary(void **module) {}
EXPORT void __cudaRegisterVar(void **module, char *a, char *b, const char *name, int external, size_t size, int constant, int global) {}
EXPORT Error cudaFuncGetAttributes(struct cudaFuncAttributes *all, const void *function) {
  memset(all, 0, sizeof *all);
  all->maxThreadsPerBlock = 1024; all->numRegs = 32; all->ptxVersion = all->binaryVersion = 90;
  return OK;
}
EXPORT Error cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) { return OK; }
EXPORT Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int block, size_t shared) { *count = 2; return OK; }
EXPORT Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int block, size_t shared, unsigned flags) { *count = 2; return OK; }
EXPORT Error cudaProfilerStart(void) { return OK; }
EXPORT Error cudaProfilerStop(void) { return OK; }

/* The driver's own calls, by name: whether a context is there is what torch asks; all else succeeds. */
static long succeeds(void) { return 0; }
static int context_state(int device, unsigned *flags, int *active) { if (flags) *flags = 0; *active = pretended_is_awake(); return 0; }
EXPORT Error cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  *found = strstr(name, "PrimaryCtxGetState") ? (void *)context_state : (void *)succeeds;
  if (result) *result = cudaDriverEntryPointSuccess;
  return OK;
}
