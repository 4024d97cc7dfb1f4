/* Undoes filters with third-party code: HDF5 filter plugins, and szip by libaec.

   A plugin is called as HDF5 calls it (H5Zpublic.h), on memory from malloc, which it may replace with
   other memory from malloc. No HDF5 lock is held. */

enum { H5Z_FLAG_REVERSE = 0x0100 };
enum PluginTrait { TAKES_TURNS = 1, CHECKS_ITS_INPUT = 2, IS_BLOSC2 = 4 };

/* Serializes plugins that use global variables. */
static pthread_mutex_t plugin_turn = PTHREAD_MUTEX_INITIALIZER;

/* Another thread may have held the lock when this process was forked. */
static void renew_plugin_turn(void)
{
    pthread_mutex_init(&plugin_turn, NULL);
}

__attribute__((constructor)) static void renew_plugin_turn_in_children(void)
{
    pthread_atfork(NULL, NULL, renew_plugin_turn);
}

/* Whether a frame (README_CFRAME_FORMAT.rst of c-blosc2) claims no more bytes than there is room for and
   its chunk has values: for an "uninitialized" chunk, the plugin returns stale heap memory. */
static int is_sound_blosc2(const uint8_t *in, int64_t n, int64_t room)
{
    enum { HEADER_AT = 11, NBYTES_AT = 30, FLAGS = 2, IS_EXTENDED = 5, SPECIAL = 31 };
    if (n < NBYTES_AT + 8 || big64(in + NBYTES_AT) > room)
        return 0;
    int64_t chunk = big32(in + HEADER_AT);
    return chunk > n - 32 || (in[chunk + FLAGS] & IS_EXTENDED) != IS_EXTENDED ||
           (in[chunk + SPECIAL] >> 4 & 7) < 4;
}

/* A truncated chunk must not decode to stale heap memory, so zeros are appended unless the plugin checks
   the length of its input. */
static int64_t unplug(Worker *w, const Filter *f, const uint8_t *in, int64_t n, uint8_t *out,
                      int64_t room)
{
    int checks = f->element & CHECKS_ITS_INPUT, takes_turns = f->element & TAKES_TURNS;
    if (f->element & IS_BLOSC2 && !is_sound_blosc2(in, n, room))
        return -1;
    uint8_t *encoded = hold(w, in, n, checks ? 0 : room);
    if (encoded == NULL)
        return -1;
    if (!checks)
        memset(encoded + n, 0, (size_t)room);
    void *buffer = encoded;
    w->held = NULL; /* owned by the plugin from here on */
    size_t nbytes = (size_t)n;
    if (takes_turns)
        pthread_mutex_lock(&plugin_turn);
    size_t count = f->function(H5Z_FLAG_REVERSE, (size_t)f->num_values, f->values, (size_t)n,
                               &nbytes, &buffer);
    if (takes_turns)
        pthread_mutex_unlock(&plugin_turn);
    int is_well = count > 0 && count <= (size_t)room && buffer != NULL;
    if (is_well)
        memcpy(out, buffer, count);
    free(buffer);
    return is_well ? (int64_t)count : -1;
}

enum { SZIP_MSB = 16, SZIP_NEAREST_NEIGHBOUR = 32 };               /* options of szlib.h */
enum { AEC_MSB = 4, AEC_PREPROCESS = 8, AEC_NOT_ENFORCE = 64 }; /* flags of libaec.h */

/* Decodes a little-endian length followed by a stream of extended Rice code (CCSDS 121.0-B) whose scan
   lines are padded to whole blocks and whose 4- and 8-byte samples are split into bytes. Like libaec's
   sz_compat.c, which is not used because it hides that a chunk decodes to too few bytes. */
static int64_t unszip(Worker *w, const Filter *f, const uint8_t *in, int64_t n, uint8_t *out,
                      int64_t room)
{
    if (n < 4 || w->libraries->aec_buffer_decode == NULL)
        return -1;
    int64_t options = f->values[0], block = f->values[1], bits = f->values[2];
    int64_t pixels = f->values[3], nbytes = little32(in);
    int64_t planes = bits == 32 || bits == 64 ? bits / 8 : 1;
    int64_t pixel = planes > 1 || bits <= 8 ? 1 : bits <= 16 ? 2 : 4;
    int64_t blocks = (pixels + block - 1) / block;
    int64_t line = pixels * pixel, padded = blocks * block * pixel;
    int64_t lines = nbytes / line, rest = nbytes % line;
    if (nbytes > room || (lines + 1) > (INT64_MAX / 4) / padded)
        return -1;
    int64_t coded = (lines + (rest > 0)) * padded;
    int64_t needed = rest ? lines * padded + rest : coded - (lines ? padded - line : 0);
    int is_in_place = coded == nbytes && planes == 1;
    if (coded > 64 * room + 65536) /* lines of a few pixels */
        return -1;
    uint8_t *stream = hold(w, in + 4, n - 4, is_in_place ? 0 : coded);
    if (stream == NULL)
        return -1;
    uint8_t *decoded = is_in_place ? out : stream + n - 4;
    AecStream aec = {
        .next_in = stream,
        .avail_in = (size_t)(n - 4),
        .next_out = decoded,
        .avail_out = (size_t)coded,
        .bits_per_sample = planes > 1 ? 8 : (uint32_t)bits,
        .block_size = (uint32_t)block,
        .rsi = (uint32_t)blocks,
        .flags = AEC_NOT_ENFORCE | (options & SZIP_MSB ? AEC_MSB : 0) |
                 (options & SZIP_NEAREST_NEIGHBOUR ? AEC_PREPROCESS : 0),
    };
    if (w->libraries->aec_buffer_decode(&aec) != 0 || (int64_t)aec.total_out < needed)
        return -1;
    if (is_in_place)
        return nbytes;
    for (int64_t i = 1; padded != line && i < lines + (rest > 0); i++)
        memmove(decoded + i * line, decoded + i * padded, (size_t)(i < lines ? line : rest));
    if (planes > 1)
        return unshuffle(decoded, nbytes, planes, out, nbytes);
    memcpy(out, decoded, (size_t)nbytes);
    return nbytes;
}
