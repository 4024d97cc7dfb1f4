/* Reads the headers of encoded images. codec/imageformats.py does the same, and raises the errors. */

enum { HEADER_WORDS = 5 }; /* of an image: is_png, height, width, components, depth */

static int64_t big_endian(const uint8_t *at, int nbytes)
{
    int64_t found = 0;
    for (int i = 0; i < nbytes; i++)
        found = found << 8 | at[i];
    return found;
}

/* Whether a marker does not end entropy-coded data, or has no length. */
static int stands_alone(uint8_t marker)
{
    return marker <= 0x01 || (marker >= 0xD0 && marker <= 0xD8);
}

/* Whether an end-of-image marker follows `at`, after complete segments. */
static int has_end(const uint8_t *data, int64_t at, int64_t end)
{
    while (at + 1 < end) {
        const uint8_t *mark = memchr(data + at, 0xFF, (size_t)(end - at - 1));
        if (!mark || mark[1] == 0xD9)
            return mark != NULL;
        at = mark - data;
        if (mark[1] == 0xFF || stands_alone(mark[1]))
            at += mark[1] == 0xFF ? 1 : 2;
        else
            at = at + 4 <= end ? at + 2 + big_endian(mark + 2, 2) : end;
    }
    return 0;
}

static int jpeg_header(const uint8_t *data, int64_t end, int64_t *found)
{
    for (int64_t at = 2; at + 4 <= end && data[at] == 0xFF;) {
        uint8_t marker = data[at + 1];
        if (marker == 0xFF) { /* padding */
            at += 1;
        } else if (marker && stands_alone(marker)) {
            at += 2;
        } else if ((marker & 0xF0) == 0xC0 && marker != 0xC4 && marker != 0xC8 && marker != 0xCC) {
            if (at + 10 > end || !has_end(data, at, end))
                return 0;
            found[1] = big_endian(data + at + 5, 2), found[2] = big_endian(data + at + 7, 2);
            found[3] = data[at + 9], found[4] = data[at + 4];
            return 1;
        } else {
            at += 2 + big_endian(data + at + 2, 2);
        }
    }
    return 0;
}

static int png_header(const uint8_t *data, int64_t end, int64_t *found)
{
    if (end < 26 || memcmp(data + 12, "IHDR", 4) != 0)
        return 0;
    found[0] = 1, found[1] = big_endian(data + 20, 4), found[2] = big_endian(data + 16, 4);
    found[4] = data[24];
    return 1;
}

static int image_header(const uint8_t *data, int64_t nbytes, int64_t *found)
{
    if (nbytes >= 8 && memcmp(data, "\x89PNG\r\n\x1a\n", 8) == 0)
        return png_header(data, nbytes, found);
    return nbytes >= 3 && memcmp(data, "\xff\xd8\xff", 3) == 0 && jpeg_header(data, nbytes, found);
}

/* Read the headers of `count` images into `found`, [count][HEADER_WORDS]. Image i is the bytes from
   offsets[i] to offsets[i + 1] of `values`, which has `nbytes`. Zeros mean not an image, or damaged. */
PUBLIC int64_t h5async_image_headers(const uint8_t *values, const int64_t *offsets, int64_t *found,
                                     int64_t nbytes, int64_t count)
{
    memset(found, 0, (size_t)count * HEADER_WORDS * sizeof *found);
    for (int64_t i = 0; i < count; i++) {
        int64_t *words = found + i * HEADER_WORDS, begin = offsets[i], end = offsets[i + 1];
        int is_inside = 0 <= begin && begin <= end && end <= nbytes;
        if (!is_inside || !image_header(values + begin, end - begin, words) || !words[1] || !words[2])
            memset(words, 0, HEADER_WORDS * sizeof *words);
    }
    return count;
}
