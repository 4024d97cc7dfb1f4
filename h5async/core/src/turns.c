/* The consumer's turns: one call hands the last batch back, requests the next ones for free slots, and
   takes the next batch. The ring of slots (deliver/slots.py) lends its state to this for the batches of a
   run, which are alike, except that the last one of an epoch may be short. For Python, these are built-in
   functions, because calls through ctypes would take longer than their work. All members change only while
   the GIL is held. */

enum { MAX_WAITS = 4096, MAX_GIVEN = 16, MAX_ENDS = 257 }; /* also declared in read/queue.py */
enum { MOST_TELLING = 8 }; /* calls of `on_left` at most, if signals interrupt them */
enum { FEW_WAITS = MAX_WAITS / (MAX_ENDS - 1) }; /* in an epoch: its waits are kept as long as its end */

/* The batches of an epoch. The first one starts at position `begin`; the last one has `last_count` samples
   and starts `last_skip` positions after the first. If `samples` is not NULL, the numbers are there, at the
   same distances. See h5async_submit. Also declared in read/queue.py. */
typedef struct {
    int64_t begin, last_skip, last_count;
    const int64_t *samples;
    const Mapping *mapping;
    const uint64_t *draw;
} RunEpoch;

/* A requested batch of samples given by the caller; it is not part of the run. */
typedef struct {
    int64_t serial, count;
    const int64_t *samples;
} Given;

/* Totals of batches taken, their samples, and the waits for them; and when the last wait began or ended. */
typedef struct {
    int64_t batches, samples, waits, wait_ns, at_ns;
} Taken;

/* What was taken before epoch `epoch` and by its end, the workers' totals then, and its number of
   batches. */
typedef struct {
    Taken begin, end;
    Done done;
    int64_t epoch, count;
} EpochEnd;

typedef struct {
    Queue *queue;
    Worker *worker; /* the consumer's own: it fills batches, too */
    int64_t num_slots;
    int64_t *slot_of;  /* [num_slots]: slot of a batch, by its serial modulo `num_slots` */
    int64_t *waits_ns; /* [MAX_WAITS]: durations of the last waits, by number modulo MAX_WAITS */
    int64_t num_samples; /* numbers of given samples are below this */
    const uint64_t *draw; /* for given samples; NULL: none */
    int64_t is_lent, is_inside, is_alone, waits_not; /* is_alone: no other thread fills batches */
    int64_t is_open, num_reading; /* threads in `read_at_once` */
    /* Python objects of `read_at_once`. fields: by field, the name, shape and dtype of its rows, and those
       of rows as read, if different (NULL: cannot read); array: makes arrays; lasting: like `later`; spare:
       a list with an entry per concurrent call: addresses of a plan, its targets, and a worker. */
    Object *fields, *array, *lasting, *spare;
    /* What the consumer wants, as in slots.py; batches below `assigned` have slots. */
    int64_t next, asked, held, assigned, reads_ahead, loops;
    /* Batches of given samples: number i is at i modulo MAX_GIVEN, and its array there in the list
       `samples`. Those below `given_begin` were taken since the state was lent; the last one of these is
       kept, because it may be in use. */
    int64_t given_begin, given_end;
    Given given[MAX_GIVEN];
    int64_t next_in_run; /* in_run(next); -1: the samples of `next` are given */
    /* The run: batches `first` to `stop`, by the serials they would have if no samples had been given since
       the state was lent. Each has `count` samples, `stride` positions after those of the one before.
       Epochs have `epoch_batches`, except the first one, which ends before `epoch_end`. Epochs after the
       last one of `epochs` are like it. */
    int64_t first, stop, stride, count, epoch_end, epoch_batches, num_epochs;
    const RunEpoch *epochs;
    int64_t epoch, number; /* epoch of batch `first`, and its number there */
    /* Python objects. type: of batches; made, later, size, index: the names of their attributes for the
       arrays, for (run, slot, serial, place in the run), for the size and for given numbers. Of the run:
       names of fields (NULL: Python makes views), what these are made of by slot (see FieldKind.views), and
       the slice of a full batch. on_left: called when the consumer has left a reader that was closed
       meanwhile; on_epoch: when an epoch has ended of which Python has to record something at once. */
    Object *type, *made, *later, *size, *index, *samples;
    Object *run, *names, *arrays, *part, *on_left, *on_epoch;
    /* Of all runs, and before epoch `begun`; is_in_epoch: its last batch has not been taken yet. */
    Taken taken, before;
    int64_t begun, is_in_epoch;
    EpochEnd *ends; /* [MAX_ENDS]: of the last epochs, by number modulo MAX_ENDS */
    int64_t num_ends;
    int64_t changes; /* changes_in_python() when Python last recorded the end of an epoch; -1: not yet */
    int64_t *num_rows; /* [2 + 2 * MAX_ENDS][num_fields]: rows of ragged fields in all batches taken, and
                          before `begun`; the same two for each of `ends`; NULL: none is ragged */
} Turns;

/* The place of a batch in the run: its epoch, from 0 on; its number in that epoch (in the first one,
   counted from the begin of the run); and whether it is the last of its epoch. */
typedef struct {
    int64_t epoch, number, is_last;
} InRun;

static InRun place_of(const Turns *t, int64_t at)
{
    int64_t behind = at - t->epoch_end;
    if (behind < 0)
        return (InRun){0, at - t->first, behind == -1};
    int64_t number = behind % t->epoch_batches;
    return (InRun){1 + behind / t->epoch_batches, number, number + 1 == t->epoch_batches};
}

static const RunEpoch *epoch_of(const Turns *t, InRun place)
{
    return &t->epochs[place.epoch < t->num_epochs ? place.epoch : t->num_epochs - 1];
}

static const Given *given_number(const Turns *t, int64_t i)
{
    return &t->given[(uint64_t)i % MAX_GIVEN];
}

/* The number in the run of the batch with a serial; for a given batch, that of the next one in the run. */
static int64_t in_run(const Turns *t, int64_t serial)
{
    int64_t i = t->given_begin;
    while (i < t->given_end && given_number(t, i)->serial < serial)
        i++;
    return serial - i;
}

/* The given samples of a batch that is in use, or not taken yet; NULL: it belongs to the run. */
static const Given *given_of(const Turns *t, int64_t serial)
{
    if (t->given_end == 0 && serial >= t->next)
        return NULL; /* the usual case */
    for (int64_t i = t->given_begin - 1; i < t->given_end; i++)
        if (given_number(t, i)->serial == serial)
            return given_number(t, i);
    return NULL;
}

static void find_next(Turns *t)
{
    t->next_in_run = given_of(t, t->next) != NULL ? -1 : in_run(t, t->next);
}

static int64_t count_of(const Turns *t, int64_t serial)
{
    const Given *given = given_of(t, serial);
    if (given != NULL)
        return given->count;
    InRun place = place_of(t, in_run(t, serial));
    return place.is_last ? epoch_of(t, place)->last_count : t->count;
}

static Job *job_of(const Turns *t, int64_t serial)
{
    return &t->queue->jobs[t->slot_of[serial % t->num_slots]];
}

static void submit_of_run(Turns *t, int64_t serial, InRun place)
{
    const RunEpoch *epoch = epoch_of(t, place);
    int64_t skipped = place.is_last ? epoch->last_skip : place.number * t->stride;
    Wish wish = {.count = place.is_last ? epoch->last_count : t->count,
                 .serial = serial,
                 .begin = epoch->begin + skipped};
    if (epoch->mapping != NULL)
        wish.mapping = *epoch->mapping;
    if (epoch->draw != NULL)
        memcpy(wish.draw, epoch->draw, sizeof wish.draw);
    submit_wish(t->queue, t->slot_of[serial % t->num_slots], &wish,
                epoch->samples == NULL ? NULL : epoch->samples + skipped, 1);
}

/* Assigns free slots to the next batches, and submits them. */
static void submit_next(Turns *t)
{
    int64_t low = t->held >= 0 ? t->held : t->next;
    for (; t->assigned - low < t->num_slots && (t->reads_ahead || t->assigned < t->asked); t->assigned++) {
        const Given *given = given_of(t, t->assigned);
        int64_t at = in_run(t, t->assigned), epoch = -1, number = -1;
        if (given == NULL && at >= t->stop)
            break;
        /* While another thread waits (is_inside), the worker is in use there. */
        int64_t begin = t->worker->trace && !t->is_inside ? now_ns() : 0;
        if (given != NULL) {
            Wish wish = {.count = given->count, .serial = t->assigned};
            if (t->draw != NULL)
                memcpy(wish.draw, t->draw, sizeof wish.draw);
            submit_wish(t->queue, t->slot_of[t->assigned % t->num_slots], &wish, given->samples, 1);
        } else {
            InRun place = place_of(t, at);
            submit_of_run(t, t->assigned, place);
            epoch = t->epoch + place.epoch, number = place.number + (place.epoch ? 0 : t->number);
        }
        if (begin) /* the number and epoch take the place of field and source */
            note_alone(t->worker, REQUESTING, t->assigned, (int32_t)number, (int32_t)epoch, begin, now_ns());
    }
}

/* Whether the consumer can work on a batch. Called with the lock held. */
static int can_help(const Queue *queue, const Job *job)
{
    return is_open(job) && (job->state != TO_PLAN || job->is_own || job->wish.serial != queue->awaited);
}

/* The batch that the consumer works on while it waits for `job`: that one or, if threads have just begun
   it, a later one. It stays with a batch (`helped`) while that has work left, because this core has it in
   its caches. NULL: none. Called with the lock held. */
static Job *job_to_help(const Turns *t, Job *job, Job *helped)
{
    const Queue *queue = t->queue;
    int helps = t->is_alone || queue->is_helped;
    if (helps && helped != NULL && can_help(queue, helped) && !helped->is_own)
        return helped;
    if (is_open(job))
        return (helps || job->is_own) && can_help(queue, job) ? job : NULL;
    /* Work that takes longer than the rest of `job` would delay handing back the slot of `job`. */
    Job *later = helps && now_ns() - job->begun_ns < queue->fill_ns / 4 ? next_job(t->queue) : NULL;
    return later != NULL && can_help(queue, later) ? later : NULL;
}

enum Help { LEFT_TO_PYTHON = -1, HAS_NOT_WAITED, LOOKS_AGAIN, HAS_HELPED };

/* Works on a batch, or waits for an event, without the GIL. Returns HAS_NOT_WAITED if it would have to
   sleep but not `may_sleep`: Python has to look for signals first. */
static enum Help help_or_wait(Turns *t, Job *job, Job **helped_last, int may_wait, int may_sleep)
{
    Queue *queue = t->queue;
    uint32_t seen = atomic_load(&queue->events);
    pthread_mutex_lock(&queue->lock);
    int is_ready = job->state == READY_JOB || job->wish.serial != t->next;
    int is_left = job->state == WITH_PYTHON || queue->is_ended;
    Job *helped = is_ready || is_left ? NULL : job_to_help(t, job, *helped_last);
    *helped_last = helped;
    int64_t next = helped ? advance(queue, helped, t->worker, t->is_alone != 0) : NEXT_NOTHING;
    int is_left_over = next >= 0; /* Python has to do the rest; a thread will plan it again */
    if (is_left_over)
        helped->state = TO_PLAN, helped->is_own = 0;
    /* Threads may be asleep, and none was woken for the open work here: that of a later batch; or of this
       one, if batches have become slower since it was planned here. */
    const Job *left = helped ? helped : job;
    int is_offered = !is_ready && (is_left_over || helped != job) && is_open(left);
    int wakes = is_offered && (offer(queue) || is_left_over);
    is_left |= (is_left_over && helped->wish.serial != queue->awaited) || next == NEXT_END;
    pthread_mutex_unlock(&queue->lock);
    if (wakes)
        pthread_cond_signal(&queue->work);
    if (is_left)
        return LEFT_TO_PYTHON;
    if (is_ready || helped)
        return is_ready ? LOOKS_AGAIN : HAS_HELPED;
    if (h5async_spin(queue, seen))
        return LOOKS_AGAIN;
    if (!may_wait)
        return LEFT_TO_PYTHON;
    if (may_sleep)
        h5async_wait(queue, seen, -1);
    return may_sleep ? LOOKS_AGAIN : HAS_NOT_WAITED;
}

/* Calls `on_left` when all have left a reader that was closed meanwhile. Returns 0 if that raised: a signal
   handler, say, before anything was done. So it is tried again, or the closing thread would wait
   forever. */
static int tell_left(Turns *t)
{
    Object *on_left = t->is_lent ? NULL : t->on_left, *error[3];
    if (on_left == NULL || t->is_inside || t->num_reading)
        return 1;
    t->on_left = NULL;
    Py_IncRef(on_left); /* its owner may be gone before the second call */
    Object *result = PyObject_CallFunctionObjArgs(on_left, NULL);
    int is_told = result != NULL;
    PyErr_Fetch(&error[0], &error[1], &error[2]);
    for (int tries = 1; result == NULL && tries < MOST_TELLING; tries++) {
        PyErr_Clear();
        result = PyObject_CallFunctionObjArgs(on_left, NULL);
    }
    PyErr_Restore(error[0], error[1], error[2]); /* the first error; it replaces later ones */
    Py_DecRef(result), Py_DecRef(on_left);
    return is_told;
}

/* Waits for the next batch. Returns 1 if it is ready; 0 if Python has to go on; -1 with an exception. */
static int await_next(Turns *t, int may_wait)
{
    Job *job = job_of(t, t->next), *helped = NULL;
    for (enum Help done = LOOKS_AGAIN; done != LEFT_TO_PYTHON && t->is_lent && !t->waits_not;) {
        pthread_mutex_lock(&t->queue->lock);
        int is_ready = job->state == READY_JOB && job->wish.serial == t->next;
        int is_other = job->wish.serial != t->next;
        pthread_mutex_unlock(&t->queue->lock);
        if (is_ready || is_other)
            return is_ready;
        int may_sleep = done == HAS_NOT_WAITED;
        if (may_sleep && PyErr_CheckSignals())
            return -1;
        if (!t->is_lent) /* a signal handler has called the reader */
            break;
        t->is_inside = 1;
        void *thread = PyEval_SaveThread();
        do
            done = help_or_wait(t, job, &helped, may_wait, may_sleep);
        while (done == HAS_HELPED); /* keeps off the GIL, which others may hold for long */
        PyEval_RestoreThread(thread);
        t->is_inside = 0;
    }
    return tell_left(t) ? 0 : -1;
}

/* Returns the views that a batch delivers, by name; NULL, without an exception, if out of memory. */
static Object *views_of(const Turns *t, int64_t serial, int64_t count)
{
    Object *part = count == t->count ? t->part : NULL;
    return new_views(t->names, PyTuple_GetItem(t->arrays, t->slot_of[serial % t->num_slots]), part, count);
}

/* Returns a new batch with some attributes set; `index` may be NULL. */
static Object *batch_of(const Turns *t, Object *later, Object *size, Object *index, Object *views)
{
    Object *batch = PyType_GenericAlloc(t->type, 0);
    if (batch != NULL && PyObject_SetAttr(batch, t->later, later) == 0 &&
        PyObject_SetAttr(batch, t->size, size) == 0 &&
        (!index || PyObject_SetAttr(batch, t->index, index) == 0) &&
        PyObject_SetAttr(batch, t->made, views) == 0)
        return batch;
    Py_DecRef(batch);
    return NULL;
}

/* If batches are uploaded: makes the caller's streams wait for a batch or, if they `are_done` with it,
   makes its slot's next upload wait for them. Returns 0 if the GPU fails: Python then reports that. */
static int order_streams(const Turns *t, int64_t serial, void *const *streams, int64_t count, int are_done)
{
    const Uploads *uploads = t->queue->uploads;
    return uploads == NULL ||
           order_uses(uploads, t->slot_of[serial % t->num_slots], streams, count, are_done);
}

static Object *new_batch(const Turns *t)
{
    int64_t at = t->slot_of[t->next % t->num_slots];
    int64_t count = count_of(t, t->next);
    const Given *given = given_of(t, t->next);
    Object *run = t->run, *slot = PyLong_FromLongLong(at), *serial = PyLong_FromLongLong(t->next);
    Object *size = PyLong_FromLongLong(count);
    int is_alike = t->next_in_run == t->next; /* the usual case */
    Object *place = is_alike ? serial : PyLong_FromLongLong(t->next_in_run);
    Object *index = given ? PyList_GetItem(t->samples, given - t->given) : NULL;
    Py_IncRef(run); /* a reader that is closed meanwhile would release it; see `take` */
    int are_plain = t->num_rows == NULL; /* views of ragged fields take longer, and are made on access */
    Object *views = t->names && are_plain ? views_of(t, t->next, count) : NULL;
    if (views == NULL)
        views = Py_BuildValue("");
    int is_made = slot && serial && size && place;
    Object *later = is_made ? PyTuple_Pack(4, run, slot, serial, place) : NULL;
    Object *batch = later ? batch_of(t, later, size, index, views) : NULL;
    Py_DecRef(run), Py_DecRef(slot), Py_DecRef(serial), Py_DecRef(size), Py_DecRef(is_alike ? NULL : place);
    Py_DecRef(later), Py_DecRef(views);
    return batch;
}

static void note_wait(Turns *t, int64_t begin)
{
    Taken *taken = &t->taken;
    taken->at_ns = now_ns();
    t->waits_ns[taken->waits++ % MAX_WAITS] = taken->at_ns - begin;
    taken->wait_ns += taken->at_ns - begin;
    note_alone(t->worker, WAITING, t->next, SEVERAL, SEVERAL, begin, taken->at_ns);
}

/* Records that the batch just taken was the last of its epoch, unless that was recorded before it was put
   back. Python is called at once for epochs with many waits, and those in which it may have counted
   something. Returns 0 if that call raised an exception. */
static int end_epoch(Turns *t)
{
    if (!t->is_in_epoch)
        return 1;
    int64_t number = t->num_ends, at = number % MAX_ENDS, changes = changes_in_python(t->queue);
    size_t fields = 2 * (size_t)t->queue->num_fields;
    int is_known = changes >= 0 && changes == t->changes;
    EpochEnd *end = &t->ends[at];
    *end = (EpochEnd){.begin = t->before, .end = t->taken, .epoch = t->begun, .count = t->epoch_batches};
    h5async_sum_done(t->queue->workers, &end->done);
    if (t->num_rows != NULL)
        memcpy(t->num_rows + fields * (size_t)(1 + at), t->num_rows, fields * sizeof *t->num_rows);
    if (is_known && t->taken.waits - t->before.waits <= FEW_WAITS) {
        t->num_ends++, t->is_in_epoch = 0;
        return 1;
    }
    Object *on_epoch = t->on_epoch, *result;
    Py_IncRef(on_epoch); /* a reader that is closed meanwhile releases it */
    result = PyObject_CallFunctionObjArgs(on_epoch, NULL);
    Py_DecRef(on_epoch), Py_DecRef(result);
    if (result != NULL)
        t->changes = changes;
    t->is_in_epoch = t->num_ends == number; /* unless Python has counted the end */
    return result != NULL;
}

/* Adds `sign` times the rows that ragged fields have in the batch in use. (Cold, to be placed elsewhere:
   between the other functions, it slowed down batches of tiny rows.) */
__attribute__((noinline, cold)) static void count_rows(Turns *t, int64_t sign)
{
    if (t->num_rows == NULL)
        return;
    const Job *job = job_of(t, t->held);
    for (int64_t field = 0; field < t->queue->num_fields; field++)
        if (job->targets[field].offsets != NULL)
            t->num_rows[field] += sign * job->targets[field].offsets[job->wish.count];
}

static void begin_epoch(Turns *t, int64_t epoch, int64_t begin)
{
    int64_t fields = t->queue->num_fields;
    t->before = t->taken, t->begun = epoch, t->is_in_epoch = 1;
    t->before.waits--, t->before.wait_ns -= t->taken.at_ns - begin, t->before.at_ns = begin;
    if (t->num_rows != NULL)
        memcpy(t->num_rows + fields, t->num_rows, (size_t)fields * sizeof *t->num_rows);
}

/* Counts the next batch as taken; the wait for it began at `begin`. Returns 0 with an exception. */
static int count_taken(Turns *t, int64_t begin)
{
    int is_given = t->next_in_run < 0;
    InRun place = place_of(t, t->next_in_run);
    if (!is_given && !place.number && (place.epoch || !t->number))
        begin_epoch(t, t->epoch + place.epoch, begin);
    t->taken.samples += count_of(t, t->next);
    t->held = t->next++;
    t->taken.batches++, t->given_begin += is_given;
    find_next(t);
    count_rows(t, 1);
    return is_given || !place.is_last || end_epoch(t);
}

/* Takes the next batch, and appends it to a list, the first argument. Returns whether it did; if not,
   Python goes on, and does the waiting if there is a second argument. Where batches are uploaded, that one
   says whether to wait here, and the streams on which the caller uses the batches follow it. */
static Object *take(Object *self, Object *const *arguments, intptr_t count)
{
    Turns *t = (void *)PyByteArray_AsString(self);
    if (!t->is_lent || t->is_inside || t->next_in_run >= t->stop ||
        (t->reads_ahead && in_run(t, t->assigned) >= t->stop))
        return PyBool_FromLong(0);
    int64_t begin = now_ns(), num_streams = count > 2 ? count - 2 : 0;
    int may_wait = num_streams ? PyLong_AsLongLong(arguments[1]) != 0 : count == 1;
    void *streams[MAX_STREAMS]; /* local: another thread may call `take` meanwhile */
    for (int64_t i = 0; i < num_streams; i++)
        streams[i] = (void *)(uintptr_t)PyLong_AsLongLong(arguments[2 + i]);
    if (t->held >= 0 && !order_streams(t, t->held, streams, num_streams, 1))
        return PyBool_FromLong(0);
    t->held = -1;
    if (t->asked <= t->next)
        t->asked = t->next + 1;
    submit_next(t);
    int status = await_next(t, may_wait);
    if (status < 0)
        return NULL;
    status = status && order_streams(t, t->next, streams, num_streams, 0);
    Object *batch = status ? new_batch(t) : NULL;
    if (status && batch == NULL)
        return NULL;
    int is_taken = batch != NULL && t->is_lent; /* garbage collection may close a reader */
    if (is_taken)
        note_wait(t, begin);
    if (is_taken && PyList_Append(arguments[0], batch) != 0)
        is_taken = -1;
    if (is_taken > 0)
        is_taken = count_taken(t, begin) ? 1 : -1;
    Py_DecRef(batch);
    return is_taken < 0 ? NULL : PyBool_FromLong(is_taken);
}

/* Returns the views of the batch in use, by name, given its serial and size; it may have been taken before
   this run. None: another batch is in use, or Python has to make the views. */
static Object *deliver(Object *self, Object *const *arguments, intptr_t count)
{
    (void)count;
    Turns *t = (void *)PyByteArray_AsString(self);
    int64_t serial = PyLong_AsLongLong(arguments[0]), size = PyLong_AsLongLong(arguments[1]);
    Object *views = NULL, *run = t->run;
    if (t->is_lent && t->names && serial == t->held) {
        Py_IncRef(run); /* as in new_batch */
        views = views_of(t, serial, size);
        Py_DecRef(run);
    }
    return views ? views : Py_BuildValue("");
}

/* Makes the batch taken last the next one again. Returns whether it did. Nothing can come in between,
   because this is a single call for Python. */
static Object *put_back(Object *self, Object *const *arguments, intptr_t count)
{
    (void)arguments, (void)count;
    Turns *t = (void *)PyByteArray_AsString(self);
    int is_taken = t->is_lent && t->held >= 0 && t->held == t->next - 1;
    if (is_taken) {
        count_rows(t, -1);
        t->taken.samples -= count_of(t, t->held);
        t->given_begin -= given_of(t, t->held) != NULL;
        t->next = t->held, t->held = -1, t->taken.batches--;
        find_next(t);
    }
    return PyBool_FromLong(is_taken);
}
