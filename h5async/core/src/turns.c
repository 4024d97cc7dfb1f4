/* The consumer's turns: in one call it hands a batch back, has free slots filled with the next ones,
   and takes the next. The ring of slots (deliver/slots.py) lends its state to this for the batches of a
   run, which are alike, but the last ones of its epochs, which may be short. Python calls functions of
   its own kind, which ctypes would make slower than what they do. All members change while the GIL is
   held. */

enum { MAX_WAITS = 4096, MAX_GIVEN = 16, MAX_ENDS = 257 }; /* read/queue.py declares them, too */
enum { MOST_TELLING = 8 }; /* signals that come as something is told */
enum { FEW_WAITS = MAX_WAITS / (MAX_ENDS - 1) }; /* of epochs whose waits are kept as long as they are */

/* The batches of an epoch: the first ones are at positions from `begin` on; the last one has
   `last_count` samples, from `last_skip` behind those of the first on; of `samples`, unless NULL; see
   h5async_submit. read/queue.py declares it, too. */
typedef struct {
    int64_t begin, last_skip, last_count;
    const int64_t *samples;
    const Mapping *mapping;
    const uint64_t *draw;
} RunEpoch;

/* A requested batch of samples that the caller gives, outside of the run. */
typedef struct {
    int64_t serial, count;
    const int64_t *samples;
} Given;

/* Batches that were taken, their samples, the waits for them, and when the last one began or ended. */
typedef struct {
    int64_t batches, samples, waits, wait_ns, at_ns;
} Taken;

/* What was taken before an epoch, whose number is `epoch`, and before its end, what was done then, and how
   many batches it has. */
typedef struct {
    Taken begin, end;
    Done done;
    int64_t epoch, count;
} EpochEnd;

typedef struct {
    Queue *queue;
    Worker *worker; /* the consumer's, who fills batches, too */
    int64_t num_slots;
    int64_t *slot_of;  /* [num_slots]: of a batch, by its serial modulo `num_slots` */
    int64_t *waits_ns; /* [MAX_WAITS]: how long the last ones took, by number modulo MAX_WAITS */
    int64_t num_samples; /* of which any may be given */
    const uint64_t *draw; /* of given ones; NULL: none */
    int64_t is_lent, is_inside, is_alone, waits_not; /* is_alone: no other thread fills batches */
    int64_t is_open, num_reading; /* threads that read samples at once */
    /* Python's, of what these read: by field, the name, shape and dtype of its rows, and of those as read,
       if they are others (NULL: nothing is read here); what makes arrays; the rest of batches, as `later`;
       and a list of what one call at a time may use: addresses of a plan, its targets, and a worker. */
    Object *fields, *array, *lasting, *spare;
    /* What the consumer wants, as in slots.py; `assigned`: those below have slots. */
    int64_t next, asked, held, assigned, reads_ahead, loops;
    /* Of batches of given samples, number i is at i modulo MAX_GIVEN, and its array in the list `samples`:
       those up to `given_begin` were taken since the state is lent, and the last one of these, which may be
       in use, is kept. */
    int64_t given_begin, given_end;
    Given given[MAX_GIVEN];
    int64_t next_in_run; /* see in_run; -1: its samples are given */
    /* The run: batches `first` to `stop`, by the serials they would have if no samples were given since the
       state is lent, of `count` samples, each `stride` positions further on; of
       epochs with `epoch_batches`, but the first one, which ends before `epoch_end`. Those behind the last one
       of `epochs` are as that one. */
    int64_t first, stop, stride, count, epoch_end, epoch_batches, num_epochs;
    const RunEpoch *epochs;
    int64_t epoch, number; /* of the batch `first` */
    /* Python's: the type of batches, the names of the members that the arrays, the run with the batch's
       place, its size and its numbers are set to; of the run: names of fields (NULL: Python makes views), of
       what these are made in each slot (see FieldKind.views), and the part of whole batches; what is
       called when the consumer has left a reader that was closed meanwhile, and when an epoch has ended
       of which Python has to note something at once. */
    Object *type, *made, *later, *size, *index, *samples;
    Object *run, *names, *arrays, *part, *on_left, *on_epoch;
    /* Of all runs, and before the epoch `begun`; is_in_epoch: its last batch was not taken yet. */
    Taken taken, before;
    int64_t begun, is_in_epoch;
    EpochEnd *ends; /* [MAX_ENDS]: of the last epochs, by number modulo MAX_ENDS */
    int64_t num_ends;
    int64_t changes; /* see changes_in_python; up to which Python knows what it has counted itself */
    int64_t *num_rows; /* [2 + 2 * MAX_ENDS][num_fields]: the rows of ragged fields of all batches taken, and
                          before that epoch; the same of `ends`; NULL: there are none */
} Turns;

/* Where a batch of the run is: in which of its epochs, from 0 on; its number among the batches of that,
   in the first one among those of the run; and whether it is the last of its epoch. */
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

/* Which batch of the run has a serial; of given samples: which one follows. */
static int64_t in_run(const Turns *t, int64_t serial)
{
    int64_t i = t->given_begin;
    while (i < t->given_end && given_number(t, i)->serial < serial)
        i++;
    return serial - i;
}

/* The given samples of a batch that is in use, or not taken yet; NULL: it is one of the run. */
static const Given *given_of(const Turns *t, int64_t serial)
{
    if (t->given_end == 0 && serial >= t->next)
        return NULL; /* as mostly */
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

/* Give free slots to the next batches, and submit these. */
static void submit_next(Turns *t)
{
    int64_t low = t->held >= 0 ? t->held : t->next;
    for (; t->assigned - low < t->num_slots && (t->reads_ahead || t->assigned < t->asked); t->assigned++) {
        const Given *given = given_of(t, t->assigned);
        int64_t at = in_run(t, t->assigned), epoch = -1, number = -1;
        if (given == NULL && at >= t->stop)
            break;
        /* (While another thread waits, the worker is its own.) */
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
        if (begin) /* as its field and source: its number and epoch */
            note_alone(t->worker, REQUESTING, t->assigned, (int32_t)number, (int32_t)epoch, begin, now_ns());
    }
}

/* Whether the consumer can do something of a batch. Holds the lock. */
static int can_help(const Queue *queue, const Job *job)
{
    return is_open(job) && (job->state != TO_PLAN || job->is_own || job->wish.serial != queue->awaited);
}

/* Of which batch the consumer does something while it waits for one: of that; or, where threads have just
   begun with it, of a later one, and of that as long as there is something, since this core has it in its
   caches. NULL: of none. Holds the lock. */
static Job *job_to_help(const Turns *t, Job *job, Job *helped)
{
    const Queue *queue = t->queue;
    int helps = t->is_alone || queue->is_helped;
    if (helps && helped != NULL && can_help(queue, helped) && !helped->is_own)
        return helped;
    if (is_open(job))
        return (helps || job->is_own) && can_help(queue, job) ? job : NULL;
    /* What takes longer than the rest of the batch would keep the consumer from handing its slot back. */
    Job *later = helps && now_ns() - job->begun_ns < queue->fill_ns / 4 ? next_job(t->queue) : NULL;
    return later != NULL && can_help(queue, later) ? later : NULL;
}

enum Help { LEFT_TO_PYTHON = -1, HAS_NOT_WAITED, LOOKS_AGAIN, HAS_HELPED };

/* Without the GIL: do something for a batch, or wait until something happens. HAS_NOT_WAITED, though
   `may_wait`: for Python to look for signals first. */
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
    int is_left_over = next >= 0; /* Python has to do the rest, once a thread has found it out again */
    if (is_left_over)
        helped->state = TO_PLAN, helped->is_own = 0;
    /* Threads may sleep, and nobody was woken for what is open of a batch now: of a later one; or of this
       one, where batches have begun to take longer since it was planned here. */
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

/* Tell who has closed the reader meanwhile that all have left it. Returns 0 if that raised: a signal
   handler, say, before anything was told. So it is told again; else who closes would wait for ever. */
static int tell_left(Turns *t)
{
    Object *on_left = t->is_lent ? NULL : t->on_left, *error[3];
    if (on_left == NULL || t->is_inside || t->num_reading)
        return 1;
    t->on_left = NULL;
    Py_IncRef(on_left); /* its owner may be gone by the second time */
    Object *result = PyObject_CallFunctionObjArgs(on_left, NULL);
    int is_told = result != NULL;
    PyErr_Fetch(&error[0], &error[1], &error[2]);
    for (int tries = 1; result == NULL && tries < MOST_TELLING; tries++) {
        PyErr_Clear();
        result = PyObject_CallFunctionObjArgs(on_left, NULL);
    }
    PyErr_Restore(error[0], error[1], error[2]); /* the first one, which replaces others */
    Py_DecRef(result), Py_DecRef(on_left);
    return is_told;
}

/* Wait for the next batch. Returns 1 where it is there; 0 where Python is to go on; -1: it raised. */
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
        while (done == HAS_HELPED); /* without the GIL, which others may keep for long */
        PyEval_RestoreThread(thread);
        t->is_inside = 0;
    }
    return tell_left(t) ? 0 : -1;
}

/* Return what a batch delivers, by name; NULL, without an exception: there is no memory. */
static Object *views_of(const Turns *t, int64_t serial, int64_t count)
{
    Object *part = count == t->count ? t->part : NULL;
    return new_views(t->names, PyTuple_GetItem(t->arrays, t->slot_of[serial % t->num_slots]), part, count);
}

/* Return a batch with some members set; `index` may be NULL. */
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

/* Have the caller's streams wait for a batch, or, if they are done with it, be waited for, where batches are
   uploaded. Returns 0 where the GPU fails: Python says so. */
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
    int is_alike = t->next_in_run == t->next; /* as mostly */
    Object *place = is_alike ? serial : PyLong_FromLongLong(t->next_in_run);
    Object *index = given ? PyList_GetItem(t->samples, given - t->given) : NULL;
    Py_IncRef(run); /* which a reader that is closed meanwhile would let go of; see `take` */
    int are_plain = t->num_rows == NULL; /* others take longer, and are made when they are asked for */
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

/* Note that the batch that was just taken was the last of its epoch; not if it was before, and put back.
   Python notes at once long epochs, and those in which it may have counted something. Returns 0 if that
   raised. */
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
    Py_IncRef(on_epoch); /* which a reader that is closed meanwhile lets go of */
    result = PyObject_CallFunctionObjArgs(on_epoch, NULL);
    Py_DecRef(on_epoch), Py_DecRef(result);
    if (result != NULL)
        t->changes = changes;
    t->is_in_epoch = t->num_ends == number; /* which Python has counted, or not */
    return result != NULL;
}

/* Add the rows that the ragged fields of the batch in use have, or subtract them. (Out of the way:
   between the others it made batches of tiny rows slower.) */
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

/* Count the next batch as taken, whose wait began at `begin`. Returns 0 if Python raised. */
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

/* Take the next batch, and append it to a list, the first argument. Returns whether it did: if not,
   Python goes on; it has to wait, if the second argument is given. Behind it, where batches are uploaded,
   are the streams on which the caller uses them; then it says itself whether it may be waited here. */
static Object *take(Object *self, Object *const *arguments, intptr_t count)
{
    Turns *t = (void *)PyByteArray_AsString(self);
    if (!t->is_lent || t->is_inside || t->next_in_run >= t->stop ||
        (t->reads_ahead && in_run(t, t->assigned) >= t->stop))
        return PyBool_FromLong(0);
    int64_t begin = now_ns(), num_streams = count > 2 ? count - 2 : 0;
    int may_wait = num_streams ? PyLong_AsLongLong(arguments[1]) != 0 : count == 1;
    void *streams[MAX_STREAMS]; /* not the turns', which another thread may try to take meanwhile */
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
    int is_taken = batch != NULL && t->is_lent; /* collecting garbage may close a reader */
    if (is_taken)
        note_wait(t, begin);
    if (is_taken && PyList_Append(arguments[0], batch) != 0)
        is_taken = -1;
    if (is_taken > 0)
        is_taken = count_taken(t, begin) ? 1 : -1;
    Py_DecRef(batch);
    return is_taken < 0 ? NULL : PyBool_FromLong(is_taken);
}

/* Return what the batch in use delivers, by name, with its serial and size given: it may have been taken
   before this run. None: that is another one, or Python is to make it. */
static Object *deliver(Object *self, Object *const *arguments, intptr_t count)
{
    (void)count;
    Turns *t = (void *)PyByteArray_AsString(self);
    int64_t serial = PyLong_AsLongLong(arguments[0]), size = PyLong_AsLongLong(arguments[1]);
    Object *views = NULL, *run = t->run;
    if (t->is_lent && t->names && serial == t->held) {
        Py_IncRef(run); /* see new_batch */
        views = views_of(t, serial, size);
        Py_DecRef(run);
    }
    return views ? views : Py_BuildValue("");
}

/* Have the batch that was taken last be the next one again. Returns whether it is; nothing can come
   between, as this is one call for Python. */
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
