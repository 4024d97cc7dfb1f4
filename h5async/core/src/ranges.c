/* Reads ranges of a source as they are stored. */

/* Read `nbytes[i]` bytes at `offset[i]` of a source to `base + target[i]`, for each i up to the first
   that cannot be read. Returns how many were read: 0 where the source is not what was indexed. */
PUBLIC int64_t h5async_read_ranges(Sources *sources, Worker *w, const int64_t *offset,
                                   const int64_t *nbytes, const int64_t *target, uint8_t *base,
                                   int64_t base_nbytes, int64_t count, int64_t number)
{
    int64_t since = now_ns(), done = 0, valid = 0;
    File file;
    Source *source = acquire_source(sources, number, &file);
    if (source == NULL)
        return 0;
    begin_tracing(w);
    while (valid < count && nbytes[valid] >= 0 && nbytes[valid] <= base_nbytes &&
           target[valid] >= 0 && target[valid] <= base_nbytes - nbytes[valid] &&
           offset[valid] >= 0 && offset[valid] <= INT64_MAX - nbytes[valid])
        valid++;
    Pieces pieces = {.offset = offset, .nbytes = nbytes, .position = target, .count = valid,
                     .unit = 1, .base = base};
    if (valid > 0)
        done = read_pieces(&file, w, &pieces);
    if (file.nbytes < 0 && !has_swmr_writer(file.fd, INT64_MAX))
        file.event = CHANGED; /* the writer has ended, and left the file for good */
    if (file.event != NO_EVENT)
        done = 0;
    for (int64_t i = 0; i < done; i++)
        w->read_nbytes += nbytes[i];
    release_source(sources, source, file.event);
    end_stage(w, READING, &since);
    end_tracing(w);
    w->returned_ns = since;
    return done;
}
