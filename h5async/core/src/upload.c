/* Uploads batches to a GPU, in the thread that filled them, with the CUDA driver API. deliver/cuda.py
   documents how events order the uploads; Python creates the events, and itself uploads other batches of the
   same slots with them. */

enum { MAX_STREAMS = 2 }; /* of the caller: CuPy's and PyTorch's */

/* The memory of a slot, its events, and a graph of the kernels that produce the delivered arrays (NULL: none).
   If rows are kept on the GPU, only `places` are uploaded, and the kernels copy the rows by them. */
typedef struct {
    const uint8_t *host;
    int64_t *places;
    uint64_t device, places_on_device;
    void *uploaded, *ready, *released[MAX_STREAMS], *graph;
} UploadedSlot;

/* Driver functions by their names, which return 0 on success; for each column, the offset of its rows in the
   memory of a slot (of `nbytes`) and the bytes of a row; and `rows`, the size of a full batch. */
typedef struct {
    int32_t (*cuCtxPushCurrent_v2)(void *), (*cuCtxPopCurrent_v2)(void **);
    int32_t (*cuMemcpyHtoDAsync_v2)(uint64_t, const void *, size_t, void *);
    int32_t (*cuEventRecord)(void *, void *), (*cuEventQuery)(void *), (*cuEventSynchronize)(void *);
    int32_t (*cuStreamWaitEvent)(void *, void *, unsigned), (*cuGraphLaunch)(void *, void *);
    void *context, *copy_stream, *work_stream;
    const UploadedSlot *slots;
    const int64_t *begins, *row_nbytes;
    int64_t num_columns, rows, nbytes;
} Uploads;

static int enter_gpu(const Uploads *u)
{
    return u->cuCtxPushCurrent_v2(u->context) == 0;
}

static int leave_gpu(const Uploads *u, int is_well)
{
    void *ours;
    return (u->cuCtxPopCurrent_v2(&ours) == 0) & is_well;
}

/* Whether the last upload from a slot's host memory is done. With `waits`, 0 means that the GPU failed. */
static int is_upload_done(const Uploads *u, int64_t slot, int waits)
{
    void *uploaded = u->slots[slot].uploaded;
    return enter_gpu(u) && leave_gpu(u, u->cuEventQuery(uploaded) == 0 ||
                                            (waits && u->cuEventSynchronize(uploaded) == 0));
}

static int upload_columns(const Uploads *u, const UploadedSlot *s, int64_t count)
{
    int is_well = 1;
    if (count == u->rows)
        return u->cuMemcpyHtoDAsync_v2(s->device, s->host, (size_t)u->nbytes, u->copy_stream) == 0;
    for (int64_t i = 0; is_well && i < u->num_columns; i++) {
        int64_t begin = u->begins[i], nbytes = count * u->row_nbytes[i];
        if (nbytes)
            is_well = u->cuMemcpyHtoDAsync_v2(s->device + (uint64_t)begin, s->host + begin, (size_t)nbytes,
                                              u->copy_stream) == 0;
    }
    return is_well;
}

static int upload_places(const Uploads *u, const UploadedSlot *s, const int64_t *places, int64_t count)
{
    size_t nbytes = (size_t)count * sizeof *places;
    memcpy(s->places, places, nbytes);
    return nbytes == 0 || u->cuMemcpyHtoDAsync_v2(s->places_on_device, s->places, nbytes, u->copy_stream) == 0;
}

/* Queue the copies of a batch's rows on the copy stream, after all uses of the slot's memory, and the kernels
   on the work stream; these process all rows of the slot, even if the batch has fewer. `places`: of rows kept
   on the GPU, or NULL. The events come after all queued work in any case. Returns 0 if the GPU fails. */
static int upload_rows(const Uploads *u, int64_t slot, const int64_t *places, int64_t count)
{
    const UploadedSlot *s = &u->slots[slot];
    if (!enter_gpu(u))
        return 0;
    int is_well = u->cuStreamWaitEvent(u->copy_stream, s->ready, 0) == 0;
    for (int i = 0; i < MAX_STREAMS; i++)
        is_well = is_well && u->cuStreamWaitEvent(u->copy_stream, s->released[i], 0) == 0;
    is_well = is_well && (places != NULL ? upload_places(u, s, places, count) : upload_columns(u, s, count));
    is_well &= u->cuEventRecord(s->uploaded, u->copy_stream) == 0;
    if (s->graph != NULL && is_well)
        is_well = u->cuStreamWaitEvent(u->work_stream, s->uploaded, 0) == 0 &&
                  u->cuGraphLaunch(s->graph, u->work_stream) == 0;
    is_well &= u->cuEventRecord(s->ready, s->graph ? u->work_stream : u->copy_stream) == 0;
    return leave_gpu(u, is_well);
}

/* Make the caller's streams wait for a slot's upload; or, if `are_done` with its batch, make the next upload
   wait for the streams. Returns 0 if the GPU fails. */
static int order_uses(const Uploads *u, int64_t slot, void *const *streams, int64_t count, int are_done)
{
    const UploadedSlot *s = &u->slots[slot];
    if (!enter_gpu(u))
        return 0;
    int is_well = 1;
    for (int64_t i = 0; i < count; i++)
        is_well &= (are_done ? u->cuEventRecord(s->released[i], streams[i])
                             : u->cuStreamWaitEvent(streams[i], s->ready, 0)) == 0;
    return leave_gpu(u, is_well);
}
