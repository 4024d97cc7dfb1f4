/* Copies runs of bytes from one memory to another: rows of samples of differing lengths. The caller has
   checked their bounds. */

PUBLIC int64_t h5async_copy_runs(uint8_t *to, const uint8_t *from, const int64_t *to_begin,
                                 const int64_t *from_begin, const int64_t *nbytes, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        memcpy(to + to_begin[i], from + from_begin[i], (size_t)nbytes[i]);
    return count;
}
