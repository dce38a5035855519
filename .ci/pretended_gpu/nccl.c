/* NCCL for the pretended CUDA: ranks of one machine exchange through shared memory, and results arrive in their stream.
 *
 * A collective waits on the host until all ranks have called it, reads what its stream comes after, and delivers the result as a
 * copy of its stream. Calls that differ are an error on all ranks, where NCCL would hang. A send waits for nobody. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

extern int pretended_begin(void *stream);
extern void pretended_deliver(void *stream, void *to, void *from, size_t size);
extern int cudaGetDevice(int *device);
extern int cudaMalloc(void **found, size_t size);
extern int cudaFree(void *begin);

#define EXPORT __attribute__((visibility("default")))
#define OK 0
#define SYSTEM_ERROR 2
#define INVALID_USAGE 5
#define MOST_RANKS 8
#define CHUNK (1u << 20)
#define NAME 96

typedef struct { char text[128]; } UniqueId;
struct call { char kind[16]; size_t count; int type, reduction, root; };
struct room { volatile int arrived, generation; struct call calls[MOST_RANKS]; char data[MOST_RANKS][CHUNK]; };
struct scaled { int type; union { double number; int64_t integer; } by; };
struct comm {
  int size, rank, device, splits;
  volatile int is_aborted;
  char name[NAME];
  struct room *room;
  unsigned long sent[MOST_RANKS], received[MOST_RANKS];
  struct scaled scaled[64];
  int scaled_count;
};

/* -------------------------------------------------------------------------------------------------------------- ranks */

/* Wait until all ranks are here; an error where the communicator is aborted meanwhile. */
static int meet(struct comm *comm) {
  struct room *room = comm->room;
  int generation = room->generation;
  if (__sync_add_and_fetch(&room->arrived, 1) == comm->size) {
    room->arrived = 0;
    __sync_add_and_fetch(&room->generation, 1);
    syscall(SYS_futex, &room->generation, FUTEX_WAKE, INT_MAX, 0, 0, 0);
    return OK;
  }
  while (room->generation == generation) {
    if (comm->is_aborted) return SYSTEM_ERROR;
    struct timespec pause = {0, 50000000};
    syscall(SYS_futex, &room->generation, FUTEX_WAIT, generation, &pause, 0, 0);
  }
  return OK;
}

static int open_comm(struct comm **made, const char *name, int size, int rank) {
  if (size > MOST_RANKS) { fprintf(stderr, "the pretended NCCL has %d ranks at most, and %d were requested\n", MOST_RANKS, size); return INVALID_USAGE; }
  struct comm *comm = calloc(1, sizeof *comm);
  comm->size = size;
  comm->rank = rank;
  snprintf(comm->name, NAME, "%s", name);
  cudaGetDevice(&comm->device);
  char path[NAME + 32];
  snprintf(path, sizeof path, "/dev/shm/pretended_nccl_%s", name);
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(struct room))) { perror(path); return SYSTEM_ERROR; }
  comm->room = mmap(0, sizeof(struct room), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (comm->room == MAP_FAILED) return SYSTEM_ERROR;
  *made = comm;
  int error = meet(comm);
  if (rank == 0) unlink(path);
  return error;
}

EXPORT int ncclGetVersion(int *version) { *version = 22809; return OK; }
EXPORT int ncclGetUniqueId(UniqueId *id) {
  unsigned char random[16];
  if (getrandom(random, sizeof random, 0) < 0) return SYSTEM_ERROR;
  memset(id, 0, sizeof *id);
  for (int i = 0; i < 16; i++) sprintf(id->text + 2 * i, "%02x", random[i]);
  return OK;
}
EXPORT int ncclCommInitRank(void **comm, int size, UniqueId id, int rank) { return open_comm((struct comm **)comm, id.text, size, rank); }
EXPORT int ncclCommInitRankConfig(void **comm, int size, UniqueId id, int rank, void *config) { return ncclCommInitRank(comm, size, id, rank); }
EXPORT int ncclCommInitRankScalable(void **comm, int size, int rank, int count, UniqueId *ids, void *config) { return ncclCommInitRank(comm, size, ids[0], rank); }
EXPORT int ncclCommDestroy(void *comm) { return OK; }
EXPORT int ncclCommFinalize(void *comm) { return OK; }
EXPORT int ncclCommAbort(void *comm) { ((struct comm *)comm)->is_aborted = 1; return OK; }
EXPORT int ncclCommGetAsyncError(void *comm, int *error) { *error = OK; return OK; }
EXPORT int ncclCommCount(void *comm, int *count) { *count = ((struct comm *)comm)->size; return OK; }
EXPORT int ncclCommUserRank(void *comm, int *rank) { *rank = ((struct comm *)comm)->rank; return OK; }
EXPORT const char *ncclGetErrorString(int error) { return error == INVALID_USAGE ? "invalid usage of the pretended NCCL" : "the pretended NCCL"; }
EXPORT const char *ncclGetLastError(void *comm) { return ""; }
EXPORT int ncclMemAlloc(void **found, size_t size) { return cudaMalloc(found, size); }
EXPORT int ncclMemFree(void *begin) { return cudaFree(begin); }

/* ------------------------------------------------------------------------------------------------------------ numbers */

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT, FLOAT8_E4M3, FLOAT8_E5M2 };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, SCALED };

static size_t size_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}
static double number_at(const void *data, size_t i, int type) {
  switch (type) {
    case HALF: return ((const _Float16 *)data)[i];
    case FLOAT: return ((const float *)data)[i];
    case DOUBLE: return ((const double *)data)[i];
    default: { uint32_t bits = (uint32_t)((const uint16_t *)data)[i] << 16; float number; memcpy(&number, &bits, 4); return number; }
  }
}
static void put_number(void *data, size_t i, int type, double number) {
  switch (type) {
    case HALF: ((_Float16 *)data)[i] = number; return;
    case FLOAT: ((float *)data)[i] = number; return;
    case DOUBLE: ((double *)data)[i] = number; return;
    default: {
      float rounded = number;
      uint32_t bits;
      memcpy(&bits, &rounded, 4);
      if (rounded == rounded) bits += 0x7fff + (bits >> 16 & 1); /* to the nearest, ties to even */
      ((uint16_t *)data)[i] = bits >> 16;
    }
  }
}
static int64_t integer_at(const void *data, size_t i, int type) {
  switch (type) {
    case INT8: return ((const int8_t *)data)[i];
    case UINT8: return ((const uint8_t *)data)[i];
    case INT32: return ((const int32_t *)data)[i];
    case UINT32: return ((const uint32_t *)data)[i];
    default: return ((const int64_t *)data)[i];
  }
}
static void put_integer(void *data, size_t i, int type, int64_t integer) {
  switch (size_of(type)) {
    case 1: ((int8_t *)data)[i] = integer; return;
    case 4: ((int32_t *)data)[i] = integer; return;
    default: ((int64_t *)data)[i] = integer;
  }
}
#define COMBINED(a, b, how) ((how) == PRODUCT ? (a) * (b) : (how) == MAXIMUM ? ((b) > (a) ? (b) : (a)) : (how) == MINIMUM ? ((b) < (a) ? (b) : (a)) : (a) + (b))

/* ------------------------------------------------------------------------------------------------------- collectives */

struct collective { struct comm *comm; struct call call; const char *sent; size_t size; char *result; };

/* The first steps of every call: all ranks make the same one, and the stream has run as far. */
static int begin(struct collective *all, void *stream) {
  struct comm *comm = all->comm;
  pretended_begin(stream);
  comm->room->calls[comm->rank] = all->call;
  int error = meet(comm);
  if (error) return error;
  for (int rank = 0; rank < comm->size; rank++) {
    struct call *other = &comm->room->calls[rank];
    if (memcmp(other, &all->call, sizeof *other)) {
      fprintf(stderr, "the pretended NCCL: rank %d calls %s of %zu and rank %d calls %s of %zu\n", comm->rank, all->call.kind, all->call.count, rank, other->kind, other->count);
      error = INVALID_USAGE;
    }
  }
  return meet(comm) || error ? INVALID_USAGE : OK;
}
/* Give every rank's bytes to `take`, a chunk at a time, rank after rank. */
static int exchange(struct collective *all, void (*take)(struct collective *, int rank, size_t offset, const char *data, size_t size)) {
  struct comm *comm = all->comm;
  for (size_t offset = 0; offset < all->size; offset += CHUNK) {
    size_t size = all->size - offset < CHUNK ? all->size - offset : CHUNK;
    memcpy(comm->room->data[comm->rank], all->sent + offset, size);
    if (meet(comm)) return SYSTEM_ERROR;
    for (int rank = 0; rank < comm->size; rank++) take(all, rank, offset, comm->room->data[rank], size);
    if (meet(comm)) return SYSTEM_ERROR;
  }
  return OK;
}
static struct call call_of(const char *kind, size_t count, int type, int reduction, int root) {
  struct call call;
  memset(&call, 0, sizeof call); /* the bytes between its fields are compared, too */
  snprintf(call.kind, sizeof call.kind, "%s", kind);
  call.count = count; call.type = type; call.reduction = reduction; call.root = root;
  return call;
}

static void join(struct collective *all, int rank, size_t offset, const char *data, size_t size) { memcpy(all->result + rank * all->size + offset, data, size); }
static void take_root(struct collective *all, int rank, size_t offset, const char *data, size_t size) { if (rank == all->call.root) memcpy(all->result + offset, data, size); }
static void take_mine(struct collective *all, int rank, size_t offset, const char *data, size_t size) {
  size_t part = all->size / all->comm->size, begin = part * all->comm->rank;
  for (size_t i = 0; i < size; i++) if (offset + i >= begin && offset + i < begin + part) all->result[rank * part + offset + i - begin] = data[i];
}
/* The result has 8 bytes for each number until all ranks' are in it: a double, or an integer. */
static void combine(struct collective *all, int rank, size_t offset, const char *data, size_t size) {
  int type = all->call.type, how = all->call.reduction;
  size_t first = offset / size_of(type);
  struct scaled *scaled = how >= SCALED ? &all->comm->scaled[(how - SCALED) % 64] : 0;
  for (size_t i = 0; i < size / size_of(type); i++) {
    if (type >= HALF) {
      double number = number_at(data, i, type) * (scaled ? scaled->by.number : 1), *sum = (double *)all->result + first + i;
      *sum = rank ? COMBINED(*sum, number, how) : number;
    } else {
      int64_t integer = integer_at(data, i, type) * (scaled ? scaled->by.integer : 1), *sum = (int64_t *)all->result + first + i;
      *sum = rank ? COMBINED(*sum, integer, how) : integer;
    }
  }
}
static int gathered(const char *kind, const void *sent, void *to, size_t count, int type, int root, size_t parts, void (*take)(struct collective *, int, size_t, const char *, size_t), struct comm *comm, void *stream) {
  struct collective all = {comm, call_of(kind, count, type, 0, root), sent, count * size_of(type)};
  int error = begin(&all, stream);
  if (error) return error;
  all.result = malloc(parts * all.size + 1);
  if ((error = exchange(&all, take))) return error;
  pretended_deliver(stream, to, all.result, parts * all.size);
  return OK;
}
static int reduced(const char *kind, const void *sent, void *to, size_t count, size_t begins, size_t kept, int type, int how, int root, struct comm *comm, void *stream) {
  if (type > BFLOAT) return INVALID_USAGE;
  struct collective all = {comm, call_of(kind, count, type, how, root), sent, count * size_of(type)};
  int error = begin(&all, stream);
  if (error) return error;
  all.result = malloc(8 * count + 8);
  if ((error = exchange(&all, combine))) return error;
  char *result = malloc(kept * size_of(type) + 1);
  for (size_t i = 0; i < kept; i++) {
    double number = ((double *)all.result)[begins + i];
    int64_t integer = ((int64_t *)all.result)[begins + i];
    if (type >= HALF) put_number(result, i, type, how == AVERAGE ? number / comm->size : number);
    else put_integer(result, i, type, how == AVERAGE ? integer / comm->size : integer);
  }
  free(all.result);
  pretended_deliver(stream, to, result, kept * size_of(type));
  return OK;
}
EXPORT int ncclAllGather(const void *sent, void *to, size_t count, int type, void *comm, void *stream) { return gathered("all_gather", sent, to, count, type, 0, ((struct comm *)comm)->size, join, comm, stream); }
EXPORT int ncclBroadcast(const void *sent, void *to, size_t count, int type, int root, void *comm, void *stream) { return gathered("broadcast", ((struct comm *)comm)->rank == root ? sent : to, to, count, type, root, 1, take_root, comm, stream); }
EXPORT int ncclBcast(void *data, size_t count, int type, int root, void *comm, void *stream) { return ncclBroadcast(data, data, count, type, root, comm, stream); }
EXPORT int ncclAlltoAll(const void *sent, void *to, size_t count, int type, void *comm, void *stream) { return gathered("all_to_all", sent, to, count * ((struct comm *)comm)->size, type, 0, 1, take_mine, comm, stream); }
EXPORT int ncclAllReduce(const void *sent, void *to, size_t count, int type, int how, void *comm, void *stream) { return reduced("all_reduce", sent, to, count, 0, count, type, how, 0, comm, stream); }
EXPORT int ncclReduce(const void *sent, void *to, size_t count, int type, int how, int root, void *comm, void *stream) { return reduced("reduce", sent, to, count, 0, ((struct comm *)comm)->rank == root ? count : 0, type, how, root, comm, stream); }
EXPORT int ncclReduceScatter(const void *sent, void *to, size_t count, int type, int how, void *comm, void *stream) {
  struct comm *of = comm;
  return reduced("reduce_scatter", sent, to, count * of->size, count * of->rank, count, type, how, 0, comm, stream);
}
/* NCCL numbers operations of one's own from 5 on, for each communicator. */
EXPORT int ncclRedOpCreatePreMulSum(int *made, void *scalar, int type, int is_on_host, void *comm) {
  struct comm *of = comm;
  struct scaled *scaled = &of->scaled[of->scaled_count % 64];
  if (type >= HALF) scaled->by.number = number_at(scalar, 0, type);
  else scaled->by.integer = integer_at(scalar, 0, type);
  *made = SCALED + of->scaled_count++;
  return OK;
}
EXPORT int ncclRedOpDestroy(int made, void *comm) { return OK; }

EXPORT int ncclCommSplit(void *parent, int color, int key, void **made, void *config) {
  struct comm *comm = parent;
  int mine[2] = {color, key}, all[MOST_RANKS][2], size = 0, rank = 0, number = comm->splits++;
  memcpy(comm->room->data[comm->rank], mine, sizeof mine);
  if (meet(comm)) return SYSTEM_ERROR;
  for (int other = 0; other < comm->size; other++) memcpy(all[other], comm->room->data[other], sizeof mine);
  if (meet(comm)) return SYSTEM_ERROR;
  *made = 0;
  if (color < 0) return OK;
  for (int other = 0; other < comm->size; other++) {
    if (all[other][0] != color) continue;
    size++;
    rank += all[other][1] < key || (all[other][1] == key && other < comm->rank);
  }
  char name[NAME + 32];
  snprintf(name, sizeof name, "%.64s_%d_%d", comm->name, number, color);
  return open_comm((struct comm **)made, name, size, rank);
}

/* ------------------------------------------------------------------------------------------------- one rank to another */

struct message { struct comm *comm; int peer; void *data; size_t size; void *stream; struct message *next; };
static __thread struct message *waiting = 0, **waiting_end = 0;
static __thread int depth = 0;

static void path_of(char *path, struct comm *comm, int from, int to, unsigned long number) {
  snprintf(path, NAME + 64, "/dev/shm/pretended_nccl_%s_%d_%d_%lu", comm->name, from, to, number);
}
static int receive(struct message *message) {
  struct comm *comm = message->comm;
  char path[NAME + 64];
  path_of(path, comm, message->peer, comm->rank, comm->received[message->peer]++);
  int file;
  while ((file = open(path, O_RDONLY | O_CLOEXEC)) < 0) {
    if (comm->is_aborted) return SYSTEM_ERROR;
    struct timespec pause = {0, 200000};
    nanosleep(&pause, 0);
  }
  pretended_begin(message->stream);
  char *data = malloc(message->size + 1);
  size_t got = 0;
  for (ssize_t more; got < message->size && (more = read(file, data + got, message->size - got)) > 0;) got += more;
  close(file);
  unlink(path);
  if (got != message->size) { fprintf(stderr, "the pretended NCCL: %zu bytes were received of %zu\n", got, message->size); free(data); return INVALID_USAGE; }
  pretended_deliver(message->stream, message->data, data, message->size);
  return OK;
}
EXPORT int ncclGroupStart(void) { depth++; return OK; }
EXPORT int ncclGroupEnd(void) {
  if (--depth) return OK;
  int error = OK;
  for (struct message *message; (message = waiting);) {
    waiting = message->next;
    if (!error) error = receive(message);
    free(message);
  }
  return error;
}
EXPORT int ncclGroupSimulateEnd(void *info) { return OK; }
EXPORT int ncclSend(const void *data, size_t count, int type, int peer, void *to, void *stream) {
  struct comm *comm = to;
  char path[NAME + 64], part[NAME + 72];
  path_of(path, comm, comm->rank, peer, comm->sent[peer]++);
  snprintf(part, sizeof part, "%s.part", path);
  pretended_begin(stream);
  int file = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  size_t size = count * size_of(type), done = 0;
  for (ssize_t more; done < size && (more = write(file, (const char *)data + done, size - done)) > 0;) done += more;
  close(file);
  return done == size && !rename(part, path) ? OK : SYSTEM_ERROR;
}
/* What is received in a group comes after all that is sent in it. */
EXPORT int ncclRecv(void *data, size_t count, int type, int peer, void *from, void *stream) {
  struct message *message = malloc(sizeof *message);
  *message = (struct message){from, peer, data, count * size_of(type), stream, 0};
  if (!waiting) waiting_end = &waiting;
  *waiting_end = message;
  waiting_end = &message->next;
  depth++;
  return ncclGroupEnd();
}
