/* Records what threads do while a reader is traced: the begin and end of each stage, with its batch, field
   and source. All threads write to one buffer; events that come after it is full are only counted.
   Consecutive events of the same stage and batch without a gap are merged; across fields or sources, only
   while the merged event is brief.

   A trace may end while threads are at work. So each thread announces, for the duration of a call, that it
   uses the buffer; whoever ends the trace learns this, and keeps the buffer meanwhile. */

enum Stage { PLANNING = 0, READING, DECODING, PLACING, TRANSFORMING, REQUESTING, WAITING, UPLOADING };
enum { SEVERAL = -1, IN_MEMORY = -3, BRIEF_NS = 1000 };

struct Trace {
    TraceEvent *events; /* [capacity], zeros at first */
    int64_t capacity;
    _Atomic int64_t count; /* of all events, including those that did not fit */
};

ALWAYS_INLINE int is_traced(Worker *w)
{
    return atomic_load_explicit(&w->tracing, memory_order_relaxed) != NULL;
}

/* Set the field and source of events from now on. */
ALWAYS_INLINE void set_traced(Worker *w, int32_t field, int32_t source)
{
    w->traced_field = field, w->traced_source = source;
}

static void put_event(Worker *w)
{
    Trace *trace = atomic_load_explicit(&w->tracing, memory_order_relaxed);
    TraceEvent *latest = &w->latest;
    if (latest->end_ns == 0)
        return;
    int64_t at = atomic_fetch_add_explicit(&trace->count, 1, memory_order_relaxed);
    if (at < trace->capacity) {
        TraceEvent event = *latest;
        event.end_ns = 0;
        trace->events[at] = event;
        __atomic_store_n(&trace->events[at].end_ns, latest->end_ns, __ATOMIC_RELEASE);
    }
    latest->end_ns = 0;
}

static NOINLINE void note_stage(Worker *w, enum Stage stage, int64_t begin, int64_t end)
{
    TraceEvent *latest = &w->latest;
    int is_same = latest->field == w->traced_field && latest->source == w->traced_source;
    if (latest->end_ns == begin && latest->stage == (int32_t)stage &&
        latest->batch == w->batch && (is_same || end - latest->begin_ns < BRIEF_NS)) {
        latest->end_ns = end;
        if (latest->field != w->traced_field)
            latest->field = SEVERAL;
        if (latest->source != w->traced_source)
            latest->source = SEVERAL;
        return;
    }
    put_event(w);
    *latest = (TraceEvent){.begin_ns = begin, .end_ns = end, .batch = w->batch,
                           .thread = (int64_t)(intptr_t)pthread_self(), .stage = (int32_t)stage,
                           .field = w->traced_field, .source = w->traced_source};
}

/* Record a stage that lasted from `since` until now, and set `since` to now for the next one. */
ALWAYS_INLINE void end_stage(Worker *w, enum Stage stage, int64_t *since)
{
    int64_t now = now_ns(), taken = now - *since;
    add_done(stage == DECODING       ? &w->done.decode_ns
             : stage == PLACING      ? &w->done.place_ns
             : stage == TRANSFORMING ? &w->done.transform_ns
             : stage == UPLOADING    ? &w->done.upload_ns
                                     : &w->done.read_ns,
             taken);
    if (is_traced(w))
        note_stage(w, stage, *since, now);
    *since = now;
}

/* Use the worker's current buffer, if any, until `end_tracing`. */
static void begin_tracing(Worker *w)
{
    Trace *trace = atomic_load_explicit(&w->trace, memory_order_relaxed);
    if (trace == NULL)
        return;
    atomic_store(&w->tracing, trace);
    if (atomic_load(&w->trace) != trace) /* taken away before the store to `tracing` was seen */
        atomic_store(&w->tracing, NULL);
    set_traced(w, SEVERAL, SEVERAL);
}

static void end_tracing(Worker *w)
{
    if (!is_traced(w))
        return;
    put_event(w);
    atomic_store(&w->tracing, NULL);
}

/* Record a single stage, outside of a call. */
static void note_alone(Worker *w, enum Stage stage, int64_t batch, int32_t field, int32_t source,
                       int64_t begin, int64_t end)
{
    begin_tracing(w);
    if (!is_traced(w))
        return;
    w->batch = batch;
    set_traced(w, field, source);
    note_stage(w, stage, begin, end);
    end_tracing(w);
}

/* Give a worker, which may be at work, a buffer, or take it away (NULL). Returns whether the worker is
   using a buffer at present, which may be its previous one. */
PUBLIC int64_t h5async_trace(Worker *w, Trace *trace)
{
    atomic_store(&w->trace, trace);
    return atomic_load(&w->tracing) != NULL;
}

/* Copy `count` events from index `begin` on. An event that is still being written has end 0. */
PUBLIC int64_t h5async_copy_events(const Trace *trace, TraceEvent *out, int64_t begin,
                                   int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        TraceEvent *event = &trace->events[begin + i];
        int64_t end_ns = __atomic_load_n(&event->end_ns, __ATOMIC_ACQUIRE);
        out[i] = end_ns ? *event : (TraceEvent){.end_ns = 0};
    }
    return count;
}

PUBLIC int64_t h5async_clock(void)
{
    return now_ns();
}
