/* The work of threads on the batches of a queue, and of a consumer that helps them: planning the oldest
   batch with open work, or reading a range of its plan. Threads also wait for more. */

/* The oldest batch that a thread can work on. Called with the lock held. */
static Job *next_job(Queue *queue)
{
    Job *found = NULL;
    for (int64_t i = 0; i < queue->num_jobs; i++) {
        Job *job = &queue->jobs[i];
        if (is_open(job) && !job->is_own &&
            (found == NULL || job->wish.serial < found->wish.serial))
            found = job;
    }
    return found;
}

static int find_samples(const Queue *queue, const Wish *wish)
{
    const Mapping *mapping = &wish->mapping;
    int64_t *samples = wish->samples, count = wish->count;
    if (!mapping->count && queue->selected == NULL) {
        for (int64_t i = 0; i < count; i++)
            samples[i] = queue->start + queue->step * (wish->begin + i);
        return 1;
    }
    if (mapping->count && !mapping->a && mapping->b) {
        if (!h5async_window_samples((const Window *)(uintptr_t)mapping->b, samples, wish->begin, count))
            return 0;
    } else if (mapping->count && !mapping->a) {
        h5async_draw(queue->table, mapping->keys, samples, queue->num_columns, wish->begin, count);
    } else {
        for (int64_t i = 0; i < count; i++)
            samples[i] = wish->begin + i;
        if (mapping->count)
            h5async_permute((uint64_t *)samples, count, mapping->count, mapping->a, mapping->b,
                            mapping->keys);
    }
    for (int64_t i = 0; queue->selected != NULL && i < count; i++)
        samples[i] = queue->selected[samples[i]];
    for (int64_t i = 0; queue->selected == NULL && i < count; i++)
        samples[i] = queue->start + queue->step * samples[i];
    return 1;
}

static int64_t *places_of(const Job *job)
{
    return job->samples + 2 * job->rows;
}

/* Plans the part of a batch that the core reads by itself, given its samples. Returns whether it did. */
static int plan_samples(const Queue *queue, Job *job)
{
    const Wish *wish = &job->wish;
    const KeptSamples *kept = queue->kept;
    int64_t *places = places_of(job);
    job->is_kept = 0;
    if (kept != NULL && !find_kept(kept, wish->samples, places, wish->count))
        return 0;
    if (kept != NULL) {
        job->generation = state_of(kept, GENERATION);
        job->is_kept = are_kept(kept, places, wish->count, job->generation);
    }
    int is_on_gpu = kept != NULL && kept->fields == NULL;
    if (!job->is_kept && (is_on_gpu || !queue->reads_files))
        return 0;
    if (is_on_gpu) {
        job->plan->num_items = job->plan->nbytes = 0;
        return 1;
    }
    for (int64_t i = 0; job->is_kept && i < queue->num_fields; i++)
        job->targets[i].is_wanted = 1; /* Python may have planned some of them */
    return h5async_plan_batch(job->plan, job->is_kept ? kept->fields : queue->fields, job->targets,
                              queue->num_fields, job->is_kept ? places : wish->samples, wish->count,
                              job->rows, job->is_kept ? kept->count : queue->num_samples,
                              queue->num_threads, wish->draw) == 1;
}

/* Plans a batch, once its slot's memory may be written to. A caller that does not wait for that leaves it
   to another thread: then, the result is 0. Called with the lock held; releases it meanwhile. */
static int plan_job(Queue *queue, Job *job, Worker *w, int waits)
{
    job->state = IN_PLAN, job->begun_ns = now_ns();
    pthread_mutex_unlock(&queue->lock);
    int is_writable =
        queue->uploads == NULL || is_upload_done(queue->uploads, job - queue->jobs, waits);
    int64_t begin = now_ns(), end;
    const Wish *wish = &job->wish;
    w->batch = wish->serial;
    begin_tracing(w);
    int are_found = is_writable && (wish->begin < 0 || find_samples(queue, wish));
    job->is_planned = are_found && plan_samples(queue, job);
    job->left_nbytes = job->plan->nbytes;
    end = now_ns();
    if (is_traced(w) && (is_writable || waits))
        note_stage(w, PLANNING, begin, end);
    end_tracing(w);
    pthread_mutex_lock(&queue->lock);
    if (!is_writable && !waits && !job->is_dropped) {
        job->state = TO_PLAN, queue->awaited = wish->serial;
        return 0;
    }
    add_done(&w->done.plan_ns, end - begin), job->work_ns += end - begin;
    job->next_item = job->is_planned && !job->is_dropped ? 0 : job->plan->num_items;
    job->under_way = job->refused = 0;
    job->state = TO_READ;
    atomic_fetch_add(&queue->events, 1); /* for a consumer that spins; one that sleeps goes on sleeping */
    return 1;
}

/* Reads items of a plan or, if it `keeps`, keeps samples that were read. Returns the number of refused
   items; -1: the reader is being closed. */
static int64_t do_range(const Queue *queue, Job *job, Worker *w, int keeps, int64_t start, int64_t stop)
{
    KeptSamples *kept = queue->kept;
    int64_t begin = now_ns();
    if (!keeps)
        return h5async_read_batch(job->plan, job->is_kept ? kept->fields : queue->fields, job->targets,
                                  job->is_kept ? kept->sources : queue->sources, w, start, stop);
    begin_tracing(w);
    keep_samples(kept, job->targets, queue->num_fields, places_of(job), start, stop, job->generation);
    end_stage(w, PLACING, &begin);
    end_tracing(w);
    return 0;
}

/* Takes a range of a plan, or of samples to be kept. Returns whether the reader is closed. Called with the
   lock held; releases it meanwhile. */
static int take_range(Queue *queue, Job *job, Worker *w)
{
    const BatchPlan *plan = job->plan;
    int64_t start = job->next_item, stop = start, nbytes = 0, end = end_of_ranges(job);
    int64_t readers = queue->num_here + queue->is_helped;
    readers = readers < most_busy(queue) ? readers : most_busy(queue);
    int64_t wanted = readers > 1 ? job->left_nbytes / (RANGES_EACH * readers) : job->left_nbytes;
    wanted = wanted > LEAST_RANGE_NBYTES ? wanted : LEAST_RANGE_NBYTES;
    int keeps = job->state == TO_KEEP;
    int64_t of_sample = keeps ? plan->nbytes / job->wish.count : 0;
    for (; stop < end && nbytes < wanted; stop++)
        nbytes += keeps ? of_sample : plan->items[stop].nbytes;
    if (start == stop)
        return 0;
    job->next_item = stop;
    job->left_nbytes -= nbytes;
    job->under_way++;
    int wakes = job->left_nbytes >= WOKEN_NBYTES && !job->is_own && offer(queue);
    w->batch = job->wish.serial;
    pthread_mutex_unlock(&queue->lock);
    if (wakes)
        pthread_cond_signal(&queue->work); /* that thread will wake the next one */
    int64_t begin = now_ns();
    int64_t refused = do_range(queue, job, w, keeps, start, stop);
    int64_t taken = now_ns() - begin;
    pthread_mutex_lock(&queue->lock);
    job->under_way--, job->work_ns += taken;
    queue->is_cold = !plan->was_cached;
    if (refused > 0)
        job->refused += refused;
    return refused < 0;
}

/* Enqueues a filled batch's upload; 0: the GPU fails. Called with the lock held; releases it meanwhile. */
static int upload_job(Queue *queue, Job *job, Worker *w)
{
    job->under_way++;
    pthread_mutex_unlock(&queue->lock);
    int64_t begin = now_ns();
    w->batch = job->wish.serial;
    begin_tracing(w);
    const int64_t *places = job->is_kept && queue->kept->fields == NULL ? places_of(job) : NULL;
    int is_sent = upload_rows(queue->uploads, job - queue->jobs, places, job->wish.count);
    end_stage(w, UPLOADING, &begin);
    end_tracing(w);
    pthread_mutex_lock(&queue->lock);
    job->under_way--;
    return is_sent;
}

/* Does a step of a batch's work. Returns NEXT_NOTHING if there is more to do, or other threads are working
   on it; NEXT_READY; NEXT_END; or its slot, if work is left, or all of it, because this thread does not
   wait for a GPU. Called with the lock held; releases it meanwhile. */
static int64_t advance(Queue *queue, Job *job, Worker *w, int waits)
{
    if (queue->is_remote) {
        job->state = IN_PLAN;
        return job - queue->jobs;
    }
    if (job->state == TO_PLAN && !plan_job(queue, job, w, waits))
        return job - queue->jobs;
    if (take_range(queue, job, w))
        return NEXT_END;
    if (is_open(job) || job->under_way)
        return NEXT_NOTHING;
    int is_left = !job->is_planned || job->refused || job->wish.needs_python; /* Python then keeps the rows */
    int is_kept = queue->kept == NULL || job->is_kept || job->state == TO_KEEP || job->wish.count == 0;
    if (!is_left && !job->is_dropped && !is_kept) {
        job->state = TO_KEEP, job->next_item = 0, job->left_nbytes = job->plan->nbytes;
        return NEXT_NOTHING;
    }
    if (queue->uploads != NULL && !is_left && !job->is_dropped)
        is_left = !upload_job(queue, job, w);
    if (job->is_dropped) {
        end_job(job);
        return NEXT_NOTHING;
    }
    if (is_left) {
        job->state = WITH_PYTHON;
        return job - queue->jobs;
    }
    job->state = READY_JOB;
    int64_t most_ns = 2 * queue->fill_ns + 1000; /* so that one slow batch hardly counts: see CHEAP_NS */
    most_ns = most_ns < MOST_FILL_NS ? most_ns : MOST_FILL_NS;
    queue->fill_ns = (queue->fill_ns + (job->work_ns < most_ns ? job->work_ns : most_ns)) / 2;
    pthread_mutex_unlock(&queue->lock); /* the consumer needs it at once, and waking it takes long */
    h5async_wake(queue);
    pthread_mutex_lock(&queue->lock);
    return NEXT_READY;
}

/* Waits for work. Called with the lock held; releases it meanwhile. */
static void wait_for_work(Queue *queue)
{
    uint32_t seen = atomic_load(&queue->offers);
    if (queue->idle_since_ns == 0)
        queue->idle_since_ns = now_ns();
    int64_t num_awake = queue->num_here - queue->num_idle + 1; /* the consumer needs a core, too */
    if (queue->spinners == 0 && num_awake <= queue->num_cores && queue->idle_ns <= SPIN_NS) {
        queue->spinners = 1;
        pthread_mutex_unlock(&queue->lock);
        spin(&queue->offers, seen);
        pthread_mutex_lock(&queue->lock);
        queue->spinners = 0;
        uint32_t offers = atomic_load(&queue->offers) - seen;
        if (offers > 1 && queue->num_idle && num_busy(queue) < most_busy(queue))
            pthread_cond_signal(&queue->work); /* no thread was woken for them */
        if (offers || next_job(queue) != NULL)
            return;
    }
    queue->num_idle++;
    pthread_cond_wait(&queue->work, &queue->lock);
    queue->num_idle--;
}

/* Does work that needs no Python, and returns the slot of a batch of which some is left. Otherwise, a
   thread that `stays` returns NEXT_TICKET, or NEXT_END, after which it need not call again; other callers
   return as `advance` does, after the work of one batch. Many threads call this, each with its own
   worker. */
PUBLIC int64_t h5async_next(Queue *queue, Worker *w, int64_t stays)
{
    int64_t next = NEXT_NOTHING;
    pthread_mutex_lock(&queue->lock);
    queue->num_here += stays, queue->num_visits += stays;
    while (!queue->is_ended && (next == NEXT_NOTHING || (stays && next < 0))) {
        if (queue->kept != NULL && state_of(queue->kept, AHEAD)) {
            pthread_mutex_unlock(&queue->lock);
            touch_ahead(queue->kept);
            pthread_mutex_lock(&queue->lock);
            continue;
        }
        Job *job = next_job(queue);
        if (stays && queue->tickets) {
            queue->tickets--;
            next = NEXT_TICKET;
            break;
        }
        if (job != NULL && next != NEXT_END)
            next = advance(queue, job, w, 1);
        else if (stays) /* after NEXT_END, the queue is about to be ended */
            wait_for_work(queue);
        else
            break;
    }
    queue->num_here -= stays;
    if (queue->is_ended)
        next = NEXT_END;
    else if (stays && queue->num_idle && next_job(queue) != NULL) /* this thread does not come for it */
        pthread_cond_signal(&queue->work);
    pthread_mutex_unlock(&queue->lock);
    w->returned_ns = now_ns();
    return next;
}

/* Fills a batch in the consumer's thread, if it `is_own`. If work is left for Python, a thread will find
   that out again. Returns whether it is filled. */
static int fill_own_job(Queue *queue, Worker *w, int64_t serial)
{
    int64_t next = NEXT_NOTHING;
    pthread_mutex_lock(&queue->lock);
    for (int64_t i = 0; i < queue->num_jobs; i++) {
        Job *job = &queue->jobs[i];
        while (next == NEXT_NOTHING && job->wish.serial == serial && job->is_own && is_open(job))
            next = advance(queue, job, w, 0);
    }
    if (next >= 0) {
        queue->jobs[next].state = TO_PLAN, queue->jobs[next].is_own = 0;
        offer(queue);
    }
    pthread_mutex_unlock(&queue->lock);
    if (next >= 0)
        pthread_cond_signal(&queue->work);
    return next == NEXT_READY;
}
