/* Fetches byte ranges of an object over HTTP, many at once, with libcurl's multi interface.

   libcurl's functions are passed as pointers, as those of codecs are. The numbers of its options,
   results and messages are part of its ABI, which <curl/curl.h> and <curl/multi.h> promise to keep.
   Ranges that fail here are left to another client, which tries again and reports errors. */

enum { /* options are longs, or pointers (from 10000 on), or functions (from 20000 on) */
    CURL_LOW_SPEED_LIMIT = 19, CURL_LOW_SPEED_TIME = 20, CURL_FOLLOWLOCATION = 52,
    CURL_MAXREDIRS = 68, CURL_HTTP_VERSION = 84, CURL_BUFFERSIZE = 98, CURL_NOSIGNAL = 99,
    CURL_TIMEOUT_MS = 155, CURL_CONNECTTIMEOUT_MS = 156, CURL_WRITEDATA = 10001, CURL_URL = 10002,
    CURL_RANGE = 10007, CURL_HTTPHEADER = 10023, CURL_HEADERDATA = 10029, CURL_CAINFO = 10065,
    CURL_PRIVATE = 10103, CURL_PROTOCOLS_STR = 10318, CURL_REDIR_PROTOCOLS_STR = 10319,
    CURL_WRITEFUNCTION = 20011, CURL_HEADERFUNCTION = 20079, CURLM_MAXCONNECTS = 6,
    CURLINFO_PRIVATE = 0x100015, CURL_HTTP_1_1 = 2 };
enum { MOST_LANES = 64, RECEIVED_NBYTES = 64 * 1024, MOST_ERROR_NBYTES = 16 * 1024 };
enum { STOP_MS = 50, CONNECT_MS = 5000, STALLED_S = 10, REQUEST_MS = 30000 };

typedef struct { /* struct CURLMsg; its only kind is CURLMSG_DONE */
    int32_t kind;
    void *easy;
    union {
        void *whatever;
        int32_t result;
    } data;
} CurlMessage;

typedef struct { /* functions of libcurl, found by name in core/binding.py */
    int (*curl_global_init)(long flags);
    void *(*curl_easy_init)(void);
    int (*curl_easy_setopt)(void *easy, int option, ...);
    int (*curl_easy_getinfo)(void *easy, int info, ...);
    void (*curl_easy_cleanup)(void *easy);
    void *(*curl_multi_init)(void);
    int (*curl_multi_setopt)(void *multi, int option, ...);
    int (*curl_multi_add_handle)(void *multi, void *easy);
    int (*curl_multi_remove_handle)(void *multi, void *easy);
    int (*curl_multi_perform)(void *multi, int *running);
    int (*curl_multi_poll)(void *multi, void *extra, unsigned num_extra, int most_ms, int *ready);
    CurlMessage *(*curl_multi_info_read)(void *multi, int *left);
    int (*curl_multi_cleanup)(void *multi);
    void *(*curl_slist_append)(void *list, const char *line);
    void (*curl_slist_free_all)(void *list);
} Curl;

enum Got { NOT_GOT = 0, GOT = 1, GOT_CHANGED = 2 /* the object was replaced */ };

typedef struct { /* a range, where its bytes go, its HTTP status, and its enum Got */
    int64_t offset, nbytes;
    uint8_t *into;
    int32_t status, got;
} HttpRange;

/* What to fetch. `headers` are NUL-terminated lines, one after the other; an empty one ends them.
   Responses must have the ETag `etag`. */
typedef struct {
    const char *url, *headers, *etag, *ca_file, *protocols;
    HttpRange *ranges;
    const int32_t *stop; /* once it is nonzero, the call ends soon */
    int64_t num_ranges, object_nbytes, most_at_once, most_redirects;
} HttpCall;

typedef struct { /* one request at a time */
    void *easy;
    const HttpCall *call;
    HttpRange *range; /* NULL: idle */
    int64_t received;
    int32_t has_range, has_etag; /* the response confirms the range, and the ETag */
} Lane;

typedef struct { /* for one thread at a time; keeps its connections between calls */
    const Curl *curl;
    void *multi;
    Lane lanes[MOST_LANES];
} HttpLoop;

/* Returns the value of the header `name` (with its colon), or NULL if the line is another one. */
static const char *header_value(const char *line, const char *name)
{
    size_t length = strlen(name);
    if (strncasecmp(line, name, length) != 0)
        return NULL;
    return line + length + strspn(line + length, " \t");
}

static int is_range(const char *value, const HttpRange *range, int64_t object_nbytes)
{
    long long first, last, nbytes;
    return sscanf(value, "bytes %lld-%lld/%lld", &first, &last, &nbytes) == 3 &&
           first == range->offset && last == first + range->nbytes - 1 && nbytes == object_nbytes;
}

/* libcurl calls this for each header line of a response. */
static size_t take_header(const char *bytes, size_t unused, size_t nbytes, void *data)
{
    (void)unused;
    Lane *lane = data;
    HttpRange *range = lane->range;
    char line[256];
    const char *value;
    size_t length = nbytes < sizeof line ? nbytes : sizeof line - 1;
    memcpy(line, bytes, length);
    line[length] = 0;
    for (; length > 0 && strchr(" \t\r\n", line[length - 1]) != NULL; length--)
        line[length - 1] = 0;
    if (strncmp(line, "HTTP/", 5) == 0) { /* again after a redirect */
        value = strchr(line, ' ');
        *lane = (Lane){.easy = lane->easy, .call = lane->call, .range = range};
        range->status = value != NULL ? atoi(value) : 0;
        range->got = NOT_GOT;
    } else if ((value = header_value(line, "content-range:")) != NULL) {
        lane->has_range = is_range(value, range, lane->call->object_nbytes);
    } else if ((value = header_value(line, "etag:")) != NULL) {
        lane->has_etag = strcmp(value, lane->call->etag) == 0;
        if (range->status == 206 && !lane->has_etag && strncmp(value, "W/", 2) != 0)
            range->got = GOT_CHANGED;
    }
    return nbytes;
}

/* libcurl calls this for bytes of a body; returning anything but `nbytes` ends the request. */
static size_t take_body(const char *bytes, size_t unused, size_t nbytes, void *data)
{
    (void)unused;
    Lane *lane = data;
    HttpRange *range = lane->range;
    int64_t received = lane->received, after = received + (int64_t)nbytes;
    lane->received = after;
    if (range->status >= 400) /* bodies of errors are read, to keep the connection */
        return after > MOST_ERROR_NBYTES ? 0 : nbytes;
    if (range->status != 206 || !lane->has_range || !lane->has_etag || after > range->nbytes)
        return 0;
    memcpy(range->into + received, bytes, nbytes);
    return nbytes;
}

static int open_lane(const HttpLoop *loop, Lane *lane)
{
    const Curl *c = loop->curl;
    void *easy = lane->easy = c->curl_easy_init();
    return easy != NULL && c->curl_easy_setopt(easy, CURL_NOSIGNAL, 1L) == 0 &&
           c->curl_easy_setopt(easy, CURL_HTTP_VERSION, (long)CURL_HTTP_1_1) == 0 &&
           c->curl_easy_setopt(easy, CURL_BUFFERSIZE, (long)RECEIVED_NBYTES) == 0 &&
           c->curl_easy_setopt(easy, CURL_TIMEOUT_MS, (long)REQUEST_MS) == 0 &&
           c->curl_easy_setopt(easy, CURL_CONNECTTIMEOUT_MS, (long)CONNECT_MS) == 0 &&
           c->curl_easy_setopt(easy, CURL_LOW_SPEED_LIMIT, 1L) == 0 &&
           c->curl_easy_setopt(easy, CURL_LOW_SPEED_TIME, (long)STALLED_S) == 0 &&
           c->curl_easy_setopt(easy, CURL_PRIVATE, lane) == 0 &&
           c->curl_easy_setopt(easy, CURL_WRITEDATA, lane) == 0 &&
           c->curl_easy_setopt(easy, CURL_HEADERDATA, lane) == 0 &&
           c->curl_easy_setopt(easy, CURL_WRITEFUNCTION, take_body) == 0 &&
           c->curl_easy_setopt(easy, CURL_HEADERFUNCTION, take_header) == 0;
}

/* Prepares a lane for a call. Fails if libcurl is too old to limit redirects to some protocols. */
static int prepare_lane(const HttpLoop *loop, Lane *lane, const HttpCall *call, void *headers)
{
    const Curl *c = loop->curl;
    if (lane->easy == NULL && !open_lane(loop, lane))
        return 0;
    lane->call = call;
    void *easy = lane->easy;
    return c->curl_easy_setopt(easy, CURL_URL, call->url) == 0 &&
           c->curl_easy_setopt(easy, CURL_HTTPHEADER, headers) == 0 &&
           c->curl_easy_setopt(easy, CURL_PROTOCOLS_STR, call->protocols) == 0 &&
           c->curl_easy_setopt(easy, CURL_REDIR_PROTOCOLS_STR, call->protocols) == 0 &&
           c->curl_easy_setopt(easy, CURL_FOLLOWLOCATION, (long)(call->most_redirects > 0)) == 0 &&
           c->curl_easy_setopt(easy, CURL_MAXREDIRS, (long)call->most_redirects) == 0 &&
           (call->ca_file == NULL ||
            c->curl_easy_setopt(easy, CURL_CAINFO, call->ca_file) == 0);
}

static int start_request(const HttpLoop *loop, Lane *lane, HttpRange *range)
{
    char text[48];
    snprintf(text, sizeof text, "%lld-%lld", (long long)range->offset,
             (long long)(range->offset + range->nbytes - 1));
    lane->range = range;
    if (loop->curl->curl_easy_setopt(lane->easy, CURL_RANGE, text) == 0 &&
        loop->curl->curl_multi_add_handle(loop->multi, lane->easy) == 0)
        return 1;
    lane->range = NULL;
    return 0;
}

static void end_request(const HttpLoop *loop, Lane *lane, int is_complete)
{
    HttpRange *range = lane->range;
    loop->curl->curl_multi_remove_handle(loop->multi, lane->easy);
    if (is_complete && range->status == 206 && lane->has_range && lane->has_etag &&
        lane->received == range->nbytes)
        range->got = GOT;
    lane->range = NULL;
}

/* Advances all requests, and returns how many have ended. */
static int64_t proceed(HttpLoop *loop)
{
    const Curl *c = loop->curl;
    int running, left;
    int64_t ended = 0;
    c->curl_multi_perform(loop->multi, &running);
    for (CurlMessage *m; (m = c->curl_multi_info_read(loop->multi, &left)) != NULL; ended++) {
        Lane *lane = NULL;
        int is_complete = m->data.result == 0;
        c->curl_easy_getinfo(m->easy, CURLINFO_PRIVATE, &lane);
        end_request(loop, lane, is_complete);
    }
    return ended;
}

PUBLIC int64_t h5async_new_http(const Curl *curl)
{
    HttpLoop *loop = calloc(1, sizeof *loop);
    if (loop != NULL && (loop->multi = curl->curl_multi_init()) != NULL) {
        loop->curl = curl;
        curl->curl_multi_setopt(loop->multi, CURLM_MAXCONNECTS, (long)MOST_LANES);
        return (int64_t)(intptr_t)loop;
    }
    free(loop);
    return 0;
}

PUBLIC int64_t h5async_free_http(HttpLoop *loop)
{
    for (int i = 0; i < MOST_LANES; i++)
        if (loop->lanes[i].easy != NULL)
            loop->curl->curl_easy_cleanup(loop->lanes[i].easy);
    loop->curl->curl_multi_cleanup(loop->multi);
    free(loop);
    return 0;
}

/* Fetches all ranges of a call, with one request each, and returns how many are missing. */
PUBLIC int64_t h5async_get_http(HttpLoop *loop, const HttpCall *call)
{
    int64_t next = 0, under_way = 0, missing = call->num_ranges;
    int64_t lanes = call->most_at_once < MOST_LANES ? call->most_at_once : MOST_LANES;
    void *headers = NULL;
    for (const char *line = call->headers; *line; line += strlen(line) + 1)
        headers = loop->curl->curl_slist_append(headers, line);
    lanes = lanes < call->num_ranges ? lanes : call->num_ranges;
    for (int64_t i = 0; i < lanes; i++)
        if (!prepare_lane(loop, &loop->lanes[i], call, headers))
            lanes = 0; /* nothing is fetched */
    while (!__atomic_load_n(call->stop, __ATOMIC_RELAXED)) {
        for (int64_t i = 0; i < lanes && next < call->num_ranges && under_way < lanes; i++)
            if (loop->lanes[i].range == NULL)
                under_way += start_request(loop, &loop->lanes[i], &call->ranges[next++]);
        if (under_way == 0)
            break;
        int64_t ended = proceed(loop);
        under_way -= ended;
        if (ended == 0)
            loop->curl->curl_multi_poll(loop->multi, NULL, 0, STOP_MS, NULL);
    }
    for (int64_t i = 0; i < lanes; i++) {
        if (loop->lanes[i].range != NULL)
            end_request(loop, &loop->lanes[i], 0);
    }
    for (int64_t i = 0; i < call->num_ranges; i++)
        missing -= call->ranges[i].got == GOT;
    loop->curl->curl_slist_free_all(headers);
    return missing;
}
