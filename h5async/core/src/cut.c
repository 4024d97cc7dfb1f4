/* Cuts samples into batches by their lengths, as order/lengths.py does. */

/* Cut samples into runs, each as long as `most_samples` and `most_values` allow but of at least one sample.
   Writes where they end to `ends`, which has room for `n`. Returns the number of runs. */
PUBLIC int64_t h5async_cut(const int64_t *lengths, int64_t *ends, int64_t n, int64_t most_samples,
                           int64_t most_values)
{
    int64_t found = 0, first = 0, left = most_values;
    for (int64_t i = 0; i < n; i++) {
        if (i > first && (lengths[i] > left || i - first >= most_samples)) {
            ends[found++] = i;
            first = i, left = most_values;
        }
        left = lengths[i] > left ? -1 : left - lengths[i];
    }
    if (n > 0)
        ends[found++] = n;
    return found;
}

/* Sort samples by length, longest first, within windows that end at `window`, and cut these into batches of
   at most `most_values` (samples times the longest length). `order` and `ends` have room for one number per
   sample. Returns the number of batches, or -1 if memory allocation fails. */
PUBLIC int64_t h5async_cut_sorted(const int64_t *lengths, const int64_t *window, int64_t *order,
                                  int64_t *ends, int64_t num_windows, int64_t most_samples,
                                  int64_t most_values)
{
    int64_t most = 0, found = 0;
    for (int64_t w = 0, first = 0; w < num_windows; first = window[w++])
        most = window[w] - first > most ? window[w] - first : most;
    Wanted *room = most < INT32_MAX ? malloc((2 * (size_t)most + 1) * sizeof *room) : NULL;
    if (room == NULL)
        return -1;
    for (int64_t w = 0, first = 0; w < num_windows; first = window[w++]) {
        int64_t count = window[w] - first, longest = 0, shortest = INT64_MAX;
        for (int64_t i = 0; i < count; i++) {
            int64_t length = lengths[first + i];
            longest = length > longest ? length : longest;
            shortest = length < shortest ? length : shortest;
            room[i] = (Wanted){-length, (int32_t)i, 0};
        }
        const Wanted *sorted = sort_wanted(room, room + most, count, -longest, longest - shortest);
        for (int64_t i = 0, end = 0; i < count; i++) {
            order[first + i] = first + sorted[i].position;
            if (i < end)
                continue;
            int64_t length = -sorted[i].sample;
            int64_t fitting = length > 0 ? most_values / length : most_samples;
            fitting = fitting < 1 ? 1 : fitting > most_samples ? most_samples : fitting;
            end = fitting < count - i ? i + fitting : count;
            ends[found++] = first + end;
        }
    }
    free(room);
    return found;
}
