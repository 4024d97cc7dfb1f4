/* The queue of batches to be read, on which threads wait for work, and the consumer for batches.

   A thread plans the oldest batch with open work, or reads a range of its plan. It returns to Python
   only with work for Python: a ticket, or a batch of which something is left.

   Events that the consumer may wait for are counted. It reads the count, checks its condition, and then
   waits for a different count; so it misses no event.

   Putting a thread to sleep and waking it takes longer than reading a small batch. So if the next batch
   is expected soon, one idle thread spins briefly; so does a consumer that helps, for batches that
   others are about to finish. No more threads are woken than there are cores, unless they wait for
   storage. */

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

enum { SPIN_NS = 200000, QUICK_NS = 100000, LONG_GAP_NS = 1000000 };
/* The consumer fills a batch itself if that takes no longer than waking a thread. While it waits for a
   slightly slower batch, it helps the threads: spinning would keep a core from them, and sleeping would
   take as long. It keeps helping until batches take three times as long, so that one slow batch does not
   end it: switching back and forth leaves cores idle. */
enum { CHEAP_NS = 25000, HELPED_NS = 300000, STILL_HELPED_NS = 900000, MOST_FILL_NS = 1000000 };
/* The rest of a batch is cut into ranges for all who may read; the last ones are the smallest. */
enum { RANGES_EACH = 2, LEAST_RANGE_NBYTES = 128 * 1024 };
enum { WOKEN_NBYTES = 256 * 1024 /* about 25 us: worth waking a thread for */ };
/* IN_PLAN: being planned, or with another process. */
enum JobState { NO_JOB = 0, TO_PLAN, IN_PLAN, TO_READ, WITH_PYTHON, READY_JOB, TO_KEEP };
/* The result of `advance` and h5async_next, if not the slot of a batch of which work is left. */
enum Next { NEXT_END = -1, NEXT_TICKET = -2, NEXT_NOTHING = -3, NEXT_READY = -4 };

/* What positions are mapped to: a permutation of them; if `a` is 0, the samples there of the Window at
   address `b` or, if `b` is 0, too, draws from the alias table; if `count` is 0, to themselves. */
typedef struct {
    uint64_t count, a, b, keys[ROUNDS];
} Mapping;

/* A submitted batch. */
typedef struct {
    int64_t *samples; /* the job's room for sample numbers */
    int64_t count, serial;
    int64_t begin; /* the first of `count` positions, mapped to samples; -1: `samples` are known */
    Mapping mapping;
    uint64_t draw[2]; /* see draw_places */
    int32_t needs_python;
} Wish;

/* The batch of a slot; and, if it was dropped while being worked on, the one that follows once that has
   ended. Python sets the first four members. */
typedef struct {
    BatchPlan *plan;
    Target *targets; /* where rows go */
    int64_t *samples;      /* room for the numbers of two batches, of `rows` each, and for the places
                              where this batch's samples are kept, or will be */
    int64_t rows, next_item, under_way, refused, left_nbytes; /* TO_KEEP: next_item is a sample */
    Wish wish, following;
    int64_t begun_ns, work_ns; /* work_ns: time spent on it so far */
    int32_t state, is_planned, is_dropped, is_own; /* is_own: the consumer will fill it */
    int32_t is_kept;    /* it was planned to be read from samples kept in memory */
    int64_t generation; /* of what was kept then */
} Job;

typedef struct {
    /* Set by Python, which keeps them alive: */
    const Field *fields;
    Sources *sources;
    Job *jobs; /* [num_jobs], by slot */
    int64_t num_fields, num_samples, num_jobs, num_threads;
    const int64_t *selected; /* the sample of each position, after mapping; NULL: start + step *
                                position */
    int64_t start, step;
    const Column *table; /* an alias table, from which samples are drawn */
    int64_t num_columns, num_cores, is_remote; /* is_remote: other processes fill the batches */
    KeptSamples *kept; /* NULL: none */
    const Uploads *uploads; /* NULL: batches stay on the host, or Python uploads them */
    int64_t reads_files; /* 0: Python plans what is read from them */
    /* The core's: */
    pthread_mutex_t lock;
    pthread_cond_t work;
    int64_t tickets, num_idle, num_visits, submitted_ns; /* num_visits: of threads that came */
    int64_t gap_ns;        /* between submissions, smoothed */
    int64_t idle_since_ns; /* since when a thread has waited for the next batch; 0: none has */
    int64_t idle_ns;       /* how long it did, smoothed */
    int64_t fill_ns; /* to fill a batch, smoothed */
    int32_t is_ended, is_helped; /* is_helped: by the consumer */
    int32_t is_cold; /* the last range read was not entirely in the page cache */
    int32_t spinners; /* threads that spin for batches: 0 or 1 */
    int64_t awaited; /* the batch whose slot was not yet writable for the consumer; -1: none */
    int64_t num_here; /* threads that stay in h5async_next */
    _Atomic int32_t consumers; /* which wait */
    _Atomic uint32_t events, offers; /* offers: counts submissions, and whatever else wakes threads */
    /* Set by Python: */
    Worker *const *workers;          /* a list of all that count; see h5async_link_worker */
    int64_t num_inside, num_changes; /* threads that may do work counted by Python; changes of that */
} Queue;

/* Spins until a count is no longer `seen`, but only briefly. */
static void spin(const _Atomic uint32_t *count, uint32_t seen)
{
    for (int64_t end = now_ns() + SPIN_NS; atomic_load(count) == seen && now_ns() < end;)
        sched_yield(); /* the awaited thread may need this core */
}

/* Adds a worker to a list. The owner keeps all workers alive as long as any call. Needs the GIL. */
PUBLIC int64_t h5async_link_worker(Worker **newest, Worker *w)
{
    w->older = *newest, *newest = w;
    return 1;
}

/* Sums the totals of all workers of a list. Needs the GIL. */
PUBLIC int64_t h5async_sum_done(Worker *const *newest, Done *sum)
{
    *sum = (Done){0};
    for (const Worker *w = *newest; w != NULL; w = w->older)
        for (size_t i = 0; i < sizeof *sum / sizeof(int64_t); i++)
            ((int64_t *)sum)[i] += __atomic_load_n((const int64_t *)&w->done + i, __ATOMIC_RELAXED);
    return 1;
}

/* How often threads that do work counted by Python came and went; -1 if one may be doing it now. */
static int64_t changes_in_python(Queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    int are_here = !queue->is_remote && queue->num_here == queue->num_inside;
    int64_t count = are_here ? queue->num_visits + queue->num_changes : -1;
    pthread_mutex_unlock(&queue->lock);
    return count;
}

PUBLIC int64_t h5async_open_queue(Queue *queue)
{
    queue->gap_ns = queue->idle_ns = LONG_GAP_NS;
    queue->fill_ns = MOST_FILL_NS;
    queue->awaited = -1;
    for (int64_t i = 0; i < queue->num_jobs; i++)
        queue->jobs[i].wish.serial = queue->jobs[i].following.serial = -1;
    return init_short_lock(&queue->lock) == 0 && pthread_cond_init(&queue->work, NULL) == 0;
}

/* Signals an event that the consumer may be waiting for. */
PUBLIC int64_t h5async_wake(Queue *queue)
{
    atomic_fetch_add(&queue->events, 1);
#if defined(SYS_futex)
    if (atomic_load(&queue->consumers))
        syscall(SYS_futex, &queue->events, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
    return 1;
}

PUBLIC int64_t h5async_events(Queue *queue)
{
    return (int64_t)atomic_load(&queue->events);
}

/* Spins briefly for another event count than `seen`, if batches come quickly, or the consumer helps.
   Separate from h5async_wait: a signal during the spin would not end the wait. */
PUBLIC int64_t h5async_spin(Queue *queue, int64_t seen)
{
    pthread_mutex_lock(&queue->lock);
    int is_soon = queue->num_cores > 1 && (queue->is_helped || queue->gap_ns <= QUICK_NS);
    pthread_mutex_unlock(&queue->lock);
    if (is_soon)
        spin(&queue->events, (uint32_t)seen);
    return atomic_load(&queue->events) != (uint32_t)seen;
}

/* Waits until the event count is no longer `seen`, a signal arrives, or `timeout_ns` are over (negative:
   no timeout). */
PUBLIC int64_t h5async_wait(Queue *queue, int64_t seen, int64_t timeout_ns)
{
    atomic_fetch_add(&queue->consumers, 1);
#if defined(SYS_futex)
    struct timespec timeout = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    syscall(SYS_futex, &queue->events, FUTEX_WAIT_PRIVATE, (uint32_t)seen,
            timeout_ns < 0 ? NULL : &timeout, NULL, 0);
#else
    struct timespec moment = {.tv_nsec = 100000}; /* polls: no wait for a count ends on signals here */
    for (int64_t end = now_ns() + (timeout_ns < 0 ? 100000000 : timeout_ns);
         atomic_load(&queue->events) == (uint32_t)seen && now_ns() < end;)
        if (nanosleep(&moment, NULL) != 0)
            break;
#endif
    atomic_fetch_sub(&queue->consumers, 1);
    return atomic_load(&queue->events) != (uint32_t)seen;
}

static int64_t smoothed(int64_t before, int64_t now)
{
    return (3 * before + (now > LONG_GAP_NS ? LONG_GAP_NS : now)) / 4;
}

/* Number of busy threads, and the consumer if it helps: each keeps a core. Called with the lock held. */
static int64_t num_busy(const Queue *queue)
{
    return queue->num_here - queue->num_idle - queue->spinners + queue->is_helped;
}

/* Maximum of num_busy. Threads that wait for storage keep no core. */
static int64_t most_busy(const Queue *queue)
{
    return queue->is_cold ? INT64_MAX : queue->num_cores;
}

/* Has threads look for work. Returns whether the caller has to wake a sleeping one, after releasing the
   lock, which that needs at once: if all are asleep (the consumer may leave work to them), or a core is
   free for one more. Called with the lock held. */
static int offer(Queue *queue)
{
    int all_sleep = queue->num_here == queue->num_idle;
    atomic_fetch_add(&queue->offers, 1);
    return queue->num_idle && !queue->spinners && (all_sleep || num_busy(queue) < most_busy(queue));
}

/* Records a submission, and returns whether to wake a thread for it: not for a batch that the consumer
   will fill, nor if batches come quickly and a thread is awake, which keeps up with them and comes for
   the next one by itself. Called with the lock held. */
static int is_to_be_woken(Queue *queue, int is_own)
{
    int64_t now = now_ns();
    queue->gap_ns = smoothed(queue->gap_ns, now - queue->submitted_ns);
    queue->idle_ns = smoothed(queue->idle_ns, queue->idle_since_ns ? now - queue->idle_since_ns : 0);
    queue->submitted_ns = now;
    queue->idle_since_ns = queue->num_here == queue->num_idle ? now : 0;
    int is_quick = queue->num_cores > 1 && queue->gap_ns <= QUICK_NS;
    return !is_own && offer(queue) && !(is_quick && queue->num_here > queue->num_idle);
}

/* Submits a batch. If it was submitted before, only lets threads fill it, unless `is_own` and it is cheap.
   `is_own`: the consumer helps while batches are quick, and fills cheap ones itself. `samples`: numbers to
   copy, or NULL. Returns 0 if the slot has another batch that is neither ready nor dropped; 2 if the batch
   has to wait for the end of a dropped one, which may still use its mapping; else 1. */
static int submit_wish(Queue *queue, int64_t slot, Wish *wish, const int64_t *samples, int is_own)
{
    int is_good = 1, wakes = 0;
    pthread_mutex_lock(&queue->lock);
    Job *job = &queue->jobs[slot];
    queue->is_helped = is_own && queue->fill_ns <= (queue->is_helped ? STILL_HELPED_NS : HELPED_NS);
    is_own = is_own && queue->fill_ns <= CHEAP_NS;
    if (job->wish.serial == wish->serial) {
        wakes = job->is_own && !is_own && is_to_be_woken(queue, 0);
        job->is_own &= is_own;
    } else if (job->following.serial != wish->serial && !queue->is_ended) {
        /* A thread may still use the numbers of a dropped batch. */
        int is_second = job->is_dropped && job->wish.samples == job->samples;
        wish->samples = job->samples + (is_second ? job->rows : 0);
        is_good = wish->count <= job->rows &&
                  (job->is_dropped || job->state == NO_JOB || job->state == READY_JOB ||
                   job->state == WITH_PYTHON);
        if (is_good && samples != NULL) {
            memcpy(wish->samples, samples, (size_t)wish->count * sizeof *samples);
            wish->begin = -1;
        }
        if (is_good && job->is_dropped)
            job->following = *wish;
        else if (is_good) {
            job->wish = *wish, job->state = TO_PLAN, job->work_ns = 0, job->is_own = is_own;
            wakes = is_to_be_woken(queue, is_own);
        }
    }
    is_good += is_good && job->is_dropped;
    pthread_mutex_unlock(&queue->lock);
    if (wakes) /* after unlocking: the thread needs the lock at once */
        pthread_cond_signal(&queue->work);
    return is_good;
}

/* Submits a batch of the samples with the numbers `samples`; NULL: those at `count` positions from
   `begin` on, which are first mapped by `mapping`, unless that is NULL. `draw`: see draw_places.
   `is_own`: the consumer will call fill_own_job. */
PUBLIC int64_t h5async_submit(Queue *queue, const int64_t *samples, const Mapping *mapping,
                              const uint64_t *draw, int64_t begin, int64_t count, int64_t slot,
                              int64_t serial, int32_t needs_python, int32_t is_own)
{
    Wish wish = {.count = count, .serial = serial, .begin = begin, .needs_python = needs_python};
    if (mapping != NULL)
        wish.mapping = *mapping;
    if (draw != NULL)
        memcpy(wish.draw, draw, sizeof wish.draw);
    return submit_wish(queue, slot, &wish, samples, is_own);
}

/* Whether a dropped batch may still use its mapping. */
PUBLIC int64_t h5async_is_dropping(Queue *queue)
{
    int found = 0;
    pthread_mutex_lock(&queue->lock);
    for (int64_t i = 0; i < queue->num_jobs; i++)
        found |= queue->jobs[i].is_dropped;
    pthread_mutex_unlock(&queue->lock);
    return found;
}

/* The serial of the batch that the queue has for a slot. */
PUBLIC int64_t h5async_serial_at(Queue *queue, int64_t slot)
{
    pthread_mutex_lock(&queue->lock);
    int64_t serial = queue->jobs[slot].wish.serial;
    pthread_mutex_unlock(&queue->lock);
    return serial;
}

/* The end of the numbers from which threads take ranges: items to read, or samples to keep. */
static int64_t end_of_ranges(const Job *job)
{
    return job->state == TO_READ   ? job->plan->num_items
           : job->state == TO_KEEP ? job->wish.count
                                   : job->next_item;
}

static void end_job(Job *job)
{
    job->wish.serial = -1, job->state = NO_JOB, job->is_dropped = 0;
    if (job->following.serial >= 0) {
        job->wish = job->following, job->state = TO_PLAN, job->work_ns = 0, job->is_own = 0;
        job->following.serial = -1;
    }
}

/* Drops a batch that nobody wants any more. Returns whether another one may be submitted for its slot,
   which then waits until work under way has ended: not if Python is working on the batch. */
PUBLIC int64_t h5async_drop(Queue *queue, int64_t slot, int64_t serial)
{
    pthread_mutex_lock(&queue->lock);
    Job *job = &queue->jobs[slot];
    int is_free = job->wish.serial != serial || job->state != WITH_PYTHON;
    if (job->following.serial == serial) {
        job->following.serial = -1;
    } else if (job->wish.serial == serial && (job->state == IN_PLAN || job->under_way)) {
        job->is_dropped = 1;
        job->next_item = end_of_ranges(job);
    } else if (job->wish.serial == serial && is_free) {
        end_job(job);
    }
    pthread_mutex_unlock(&queue->lock);
    return is_free;
}

/* Where the numbers of a slot's batch begin in the job's `samples`. With a negative `serial`: of the
   batch that Python works on; else -1, unless that batch is ready and nothing was left to Python. */
PUBLIC int64_t h5async_samples_at(Queue *queue, int64_t slot, int64_t serial)
{
    pthread_mutex_lock(&queue->lock);
    const Job *job = &queue->jobs[slot];
    int are_there = serial < 0 || (job->wish.serial == serial && job->state == READY_JOB);
    int64_t at = are_there ? job->wish.samples - job->samples : -1;
    pthread_mutex_unlock(&queue->lock);
    return at;
}

/* Makes one thread return to Python. */
PUBLIC int64_t h5async_put_ticket(Queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    queue->tickets++;
    atomic_fetch_add(&queue->offers, 1);
    pthread_mutex_unlock(&queue->lock);
    pthread_cond_signal(&queue->work);
    return 1;
}

/* Makes all threads return to Python for good, including those that come later. */
PUBLIC int64_t h5async_end_queue(Queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    queue->is_ended = 1;
    atomic_fetch_add(&queue->offers, 1);
    pthread_cond_broadcast(&queue->work);
    pthread_mutex_unlock(&queue->lock);
    return h5async_wake(queue);
}

static int is_open(const Job *job)
{
    return job->state == TO_PLAN || job->next_item < end_of_ranges(job);
}

/* Records that another process has filled a batch or, unless `is_ready`, that Python does the rest. */
PUBLIC int64_t h5async_finish(Queue *queue, int64_t slot, int64_t serial, int64_t is_ready)
{
    pthread_mutex_lock(&queue->lock);
    Job *job = &queue->jobs[slot];
    if (job->wish.serial == serial && job->state == IN_PLAN) {
        if (job->is_dropped)
            end_job(job);
        else
            job->state = is_ready ? READY_JOB : WITH_PYTHON;
    }
    int wakes = is_open(job);
    atomic_fetch_add(&queue->offers, wakes);
    pthread_mutex_unlock(&queue->lock);
    if (wakes) /* the batch that follows a dropped one */
        pthread_cond_signal(&queue->work);
    return h5async_wake(queue);
}

/* Forgets all batches. No thread may be working on any. */
PUBLIC int64_t h5async_forget_jobs(Queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    for (int64_t i = 0; i < queue->num_jobs; i++) {
        queue->jobs[i].following.serial = -1;
        end_job(&queue->jobs[i]);
    }
    pthread_mutex_unlock(&queue->lock);
    return 1;
}
