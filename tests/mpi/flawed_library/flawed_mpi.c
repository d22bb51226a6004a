/* MPI with a flaw, loaded before the real library: what a data check must be able to see, whoever calls MPI.
 *
 * COMMBENCH_TEST_FLAW: "nothing" is done, or "flip": one bit of every twentieth result is turned on rank 1.
 */
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

static int does_nothing(void) {
    const char *flaw = getenv("COMMBENCH_TEST_FLAW");
    return flaw != NULL && strcmp(flaw, "nothing") == 0;
}

static void flip(void *result, int count) {
    static int calls;
    const char *flaw = getenv("COMMBENCH_TEST_FLAW");
    int rank;
    PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank == 1 && count > 0 && flaw != NULL && strcmp(flaw, "flip") == 0 && ++calls % 20 == 0)
        *(char *)result ^= 1;
}

int MPI_Allreduce(const void *give, void *take, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
    if (does_nothing())
        return MPI_SUCCESS;
    int error = PMPI_Allreduce(give, take, count, type, op, comm);
    flip(take, count);
    return error;
}

/* What commbench's own algorithms add with, in compiled code only. */
int MPI_Reduce_local(const void *give, void *take, int count, MPI_Datatype type, MPI_Op op) {
    if (does_nothing())
        return MPI_SUCCESS;
    int error = PMPI_Reduce_local(give, take, count, type, op);
    flip(take, count);
    return error;
}
