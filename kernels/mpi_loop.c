/* Performs and times MPI operations without an interpreter between two of them.
 *
 * A program is a run of records; an operation of commbench is a program. Records are written by the functions below and
 * nowhere else, so that nobody but this file knows how they lie in memory. MPI handles arrive as pointers to where the
 * caller keeps them, because they are pointers in one library and integers in another.
 *
 * Every function that calls MPI returns MPI_SUCCESS or the first error of the calls.
 */
#include <errno.h>
#include <mpi.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PIECE = 8192 }; /* bytes: a small part of a first-level cache */

enum kind {
    NOTHING,
    ALL_REDUCE,
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE,
    GATHER,
    SCATTER,
    SEND_RECV,
    BARRIER,
    STEP,
    COPY,
    COMBINE
};

struct record {
    enum kind kind;
    int count;
    int root;
    int to, from;
    void *give, *take;
    const void *other;
    size_t bytes;
    MPI_Datatype type;
    MPI_Op op;
    MPI_Comm comm;
    int requests;
    MPI_Request *request, **handle;
};

/* -- what a library must agree on before it is trusted ------------------------------------------------------------ */

int commbench_version(char *text, int size) {
    char found[MPI_MAX_LIBRARY_VERSION_STRING];
    int length, error = MPI_Get_library_version(found, &length);
    if (error == MPI_SUCCESS) {
        strncpy(text, found, (size_t)size - 1);
        text[size - 1] = '\0';
    }
    return error;
}

int commbench_sizes(size_t *comm, size_t *type, size_t *op, size_t *request) {
    *comm = sizeof(MPI_Comm), *type = sizeof(MPI_Datatype), *op = sizeof(MPI_Op), *request = sizeof(MPI_Request);
    return MPI_SUCCESS;
}

/* -- records ------------------------------------------------------------------------------------------------------ */

const size_t commbench_record_bytes = sizeof(struct record);

struct record *commbench_records(int count) { return calloc((size_t)count, sizeof(struct record)); }

void commbench_free(struct record *records, int count) {
    for (int i = 0; i < count; i++)
        free(records[i].request), free(records[i].handle);
    free(records);
}

/* give and take: 0 for none, 1 for MPI_IN_PLACE, else an address. Returns 0 for a name that is no collective's. */
int commbench_collective(struct record *at, const char *name, uintptr_t give, uintptr_t take, int count, int root,
                         int to, int from, const void *type, const void *op, const void *comm) {
    static const char *const names[] = {"",       "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
                                        "reduce", "gather",     "scatter",    "send_recv",      "barrier"};
    for (int kind = ALL_REDUCE; kind <= BARRIER; kind++)
        if (strcmp(name, names[kind]) == 0) {
            at->kind = (enum kind)kind;
            at->give = give == 1 ? MPI_IN_PLACE : (void *)give;
            at->take = take == 1 ? MPI_IN_PLACE : (void *)take;
            at->count = count, at->root = root, at->to = to, at->from = from;
            memcpy(&at->type, type, sizeof at->type);
            memcpy(&at->op, op, sizeof at->op);
            memcpy(&at->comm, comm, sizeof at->comm);
            return 1;
        }
    return 0;
}

/* Starts these persistent requests and waits for all: handles are where the caller keeps them, which MPI may replace
 * when it starts them. Returns 0 where memory is short. */
int commbench_step(struct record *at, int requests, void *const *handles) {
    size_t some = (size_t)(requests ? requests : 1);
    at->kind = STEP, at->requests = requests;
    at->request = malloc(some * sizeof *at->request);
    at->handle = malloc(some * sizeof *at->handle);
    if (!at->request || !at->handle)
        return 0;
    for (int i = 0; i < requests; i++)
        at->handle[i] = handles[i];
    return 1;
}

void commbench_copy(struct record *at, void *target, void *source, size_t bytes) {
    at->kind = COPY, at->take = target, at->give = source, at->bytes = bytes;
}

/* target = left op right for commutative ops; target may be left or right. */
void commbench_combine(struct record *at, void *target, void *left, void *right, int count, size_t bytes,
                       const void *type, const void *op) {
    if (target == left) {
        left = right;
        right = target;
    }
    at->kind = COMBINE, at->take = target, at->give = left, at->other = right, at->count = count, at->bytes = bytes;
    memcpy(&at->type, type, sizeof at->type);
    memcpy(&at->op, op, sizeof at->op);
}

/* -- performing --------------------------------------------------------------------------------------------------- */

static int step(const struct record *r) {
    for (int i = 0; i < r->requests; i++)
        r->request[i] = *r->handle[i];
    int error = MPI_Startall(r->requests, r->request);
    if (error == MPI_SUCCESS)
        error = MPI_Waitall(r->requests, r->request, MPI_STATUSES_IGNORE);
    for (int i = 0; i < r->requests; i++)
        *r->handle[i] = r->request[i];
    return error;
}

/* MPI adds to a buffer in place. A third one is filled piece by piece, so that what is added to is still in the cache. */
static int combine(const struct record *r) {
    if (r->take == r->other || r->count == 0)
        return MPI_Reduce_local(r->give, r->take, r->count, r->type, r->op);
    const size_t item = r->bytes / (size_t)r->count;
    const int most = (int)(PIECE / item);
    int error = MPI_SUCCESS;
    for (int done = 0, some; done < r->count && error == MPI_SUCCESS; done += some) {
        const size_t at = (size_t)done * item;
        some = r->count - done < most ? r->count - done : most;
        memcpy((char *)r->take + at, (const char *)r->other + at, (size_t)some * item);
        error = MPI_Reduce_local((char *)r->give + at, (char *)r->take + at, some, r->type, r->op);
    }
    return error;
}

/* kind is the record's own. Where it is known to the compiler, nothing is left of the choice. */
static inline __attribute__((always_inline)) int perform_as(enum kind kind, const struct record *r) {
    switch (kind) {
    case NOTHING:
        return MPI_SUCCESS;
    case ALL_REDUCE:
        return MPI_Allreduce(r->give, r->take, r->count, r->type, r->op, r->comm);
    case ALL_GATHER:
        return MPI_Allgather(r->give, r->count, r->type, r->take, r->count, r->type, r->comm);
    case REDUCE_SCATTER:
        return MPI_Reduce_scatter_block(r->give, r->take, r->count, r->type, r->op, r->comm);
    case ALL_TO_ALL:
        return MPI_Alltoall(r->give, r->count, r->type, r->take, r->count, r->type, r->comm);
    case BROADCAST:
        return MPI_Bcast(r->take, r->count, r->type, r->root, r->comm);
    case REDUCE:
        return MPI_Reduce(r->give, r->take, r->count, r->type, r->op, r->root, r->comm);
    case GATHER:
        return MPI_Gather(r->give, r->count, r->type, r->take, r->count, r->type, r->root, r->comm);
    case SCATTER:
        return MPI_Scatter(r->give, r->count, r->type, r->take, r->count, r->type, r->root, r->comm);
    case SEND_RECV:
        return MPI_Sendrecv(r->give, r->count, r->type, r->to, 0, r->take, r->count, r->type, r->from, 0, r->comm,
                            MPI_STATUS_IGNORE);
    case BARRIER:
        return MPI_Barrier(r->comm);
    case STEP:
        return step(r);
    case COPY:
        memcpy(r->take, r->give, r->bytes);
        return MPI_SUCCESS;
    case COMBINE:
        return combine(r);
    }
    return MPI_ERR_OTHER;
}

static inline int perform(const struct record *r) { return perform_as(r->kind, r); }

static inline int perform_all(const struct record *from, const struct record *to) {
    int error = MPI_SUCCESS;
    while (from < to && (error = perform(from)) == MPI_SUCCESS)
        from++;
    return error;
}

/* -- timing ------------------------------------------------------------------------------------------------------- */

static inline int64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

static void wait_until(int64_t start_ns, int spin) {
    if (spin) {
        while (now_ns() < start_ns)
            ;
        return;
    }
    struct timespec at = {.tv_sec = start_ns / 1000000000, .tv_nsec = start_ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR)
        ;
}

/* The same where each program is one record of this kind, as collectives are: a few nanoseconds less an operation. */
static inline __attribute__((always_inline)) int stream_as(enum kind kind, const struct record *records, int programs,
                                                           int program, int64_t count) {
    int error = MPI_SUCCESS;
    const struct record *at = records + program, *const end = records + programs;
    for (int64_t left = count; left > 0 && error == MPI_SUCCESS; left--) {
        error = perform_as(kind, at);
        if (++at == end)
            at = records;
    }
    return error;
}

static int stream_alike(const struct record *records, int programs, int program, int64_t count) {
    switch (records->kind) {
#define ALIKE(kind) \
    case kind: \
        return stream_as(kind, records, programs, program, count);
        ALIKE(ALL_REDUCE)
        ALIKE(ALL_GATHER)
        ALIKE(REDUCE_SCATTER)
        ALIKE(ALL_TO_ALL)
        ALIKE(BROADCAST)
        ALIKE(REDUCE)
        ALIKE(GATHER)
        ALIKE(SCATTER)
        ALIKE(SEND_RECV)
        ALIKE(BARRIER)
        ALIKE(STEP)
        ALIKE(COPY)
        ALIKE(COMBINE)
#undef ALIKE
    case NOTHING:
        break;
    }
    return MPI_SUCCESS;
}

static int are_alike(const struct record *records, const int32_t *bounds, int programs) {
    for (int i = 0; i < programs; i++)
        if (bounds[i] != i || bounds[i + 1] != i + 1 || records[i].kind != records[0].kind)
            return 0;
    return 1;
}

static int stream_any(const struct record *records, const int32_t *bounds, int programs, int program, int64_t count) {
    int error = MPI_SUCCESS;
    const int32_t *at = bounds + program, *const end = bounds + programs;
    for (int64_t left = count; left > 0 && error == MPI_SUCCESS; left--) {
        error = perform_all(records + at[0], records + at[1]);
        if (++at == end)
            at = bounds;
    }
    return error;
}

/* count operations back to back, beginning with this program and taking the next each time: program i is records[bounds[i]]
 * to records[bounds[i + 1]]. stamps: two readings of the clock, around all of them. */
int commbench_streamed(const struct record *records, const int32_t *bounds, int programs, int program, int64_t count,
                       int64_t *stamps) {
    int alike = are_alike(records, bounds, programs);
    stamps[0] = now_ns();
    int error = alike ? stream_alike(records, programs, program, count)
                      : stream_any(records, bounds, programs, program, count);
    stamps[1] = now_ns();
    return error;
}

/* count operations, each of a program of its own and started at starts[i], or behind the barrier where there is one.
 * beat: where the number of the iteration is kept for others to see, or NULL. stamps: two readings each.
 * A rank that has no programs only takes part in the barriers. */
int commbench_isolated(const struct record *records, const int32_t *bounds, int programs, int64_t count,
                       const int64_t *starts, int spin, const struct record *barrier, void *beat, int64_t first,
                       int64_t *stamps) {
    int error = MPI_SUCCESS;
    for (int64_t i = 0; i < count && error == MPI_SUCCESS; i++) {
        int64_t number = first + i;
        if (beat)
            memcpy(beat, &number, sizeof number);
        if (barrier)
            error = perform(barrier);
        else if (programs)
            wait_until(starts[i], spin);
        if (!programs || error != MPI_SUCCESS)
            continue;
        const struct record *from = records + bounds[i % programs], *to = records + bounds[i % programs + 1];
        stamps[2 * i] = now_ns();
        error = perform_all(from, to);
        stamps[2 * i + 1] = now_ns();
    }
    return error;
}
