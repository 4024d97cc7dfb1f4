/* Checks which bytes of a far source are cached on a local disk; io/diskcache.py writes them.

   A mirror is a file with the source's blocks at their own offsets, followed by a checksum for each block;
   0 means the block is missing. A block is trusted once this process has verified its checksum. */

enum { MIRROR_BLOCK = 4096, BLOCK_WORDS = MIRROR_BLOCK / 8 };

static int is_intact(const Mirror *m, int64_t block)
{
    const uint64_t *words = (const void *)(m->map + block * MIRROR_BLOCK), *sums;
    int64_t num_blocks = (m->nbytes + MIRROR_BLOCK - 1) / MIRROR_BLOCK;
    uint64_t sum = 0;
    sums = (const void *)(m->map + num_blocks * MIRROR_BLOCK);
    if (sums[block] == 0)
        return 0;
    for (int i = 0; i < BLOCK_WORDS; i++)
        sum += (words[i] ^ words[i] >> 32) * m->weights[i];
    if ((sum | 1) == sums[block])
        __atomic_store_n(&m->marks[block], 1, __ATOMIC_RELEASE);
    return (sum | 1) == sums[block];
}

static int is_within_mirror(const Mirror *m, int64_t offset, int64_t nbytes)
{
    return m != NULL && offset >= 0 && nbytes > 0 && offset <= m->nbytes - nbytes;
}

/* Whether all blocks of a range have already been verified. */
static int mirror_is_marked(const Mirror *m, int64_t offset, int64_t nbytes)
{
    int64_t first = offset / MIRROR_BLOCK, last = (offset + nbytes - 1) / MIRROR_BLOCK;
    return is_within_mirror(m, offset, nbytes) &&
           memchr(m->marks + first, 0, (size_t)(last - first + 1)) == NULL;
}

static int mirror_has(const Mirror *m, int64_t offset, int64_t nbytes)
{
    if (!is_within_mirror(m, offset, nbytes))
        return 0;
    for (int64_t at = offset / MIRROR_BLOCK; at <= (offset + nbytes - 1) / MIRROR_BLOCK; at++)
        if (!__atomic_load_n(&m->marks[at], __ATOMIC_ACQUIRE) && !is_intact(m, at))
            return 0;
    return 1;
}
