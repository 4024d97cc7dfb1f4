/* Does work that reads a memory map, and reports whether all pages of the map could be read.

   Touching a page of a mapped file that was truncated, or that the disk cannot read, kills the process
   with SIGBUS. While this thread copies from one of our maps, a signal for an address in that map ends
   the work instead; any other signal is passed on to the previously installed handler. If another
   handler was installed after ours, ours is installed again before the next piece of work, and passes
   signals on to that one. */

#if defined(__GLIBC__)
/* Needs no allocation at first use, so that the handler may read it in any thread. */
#define IN_STATIC_TLS __attribute__((tls_model("initial-exec")))
#else
#define IN_STATIC_TLS
#endif

typedef struct {
    const uint8_t *begin, *end;
    sigjmp_buf back;
} Guard;

static _Thread_local Guard *volatile guard_here IN_STATIC_TLS;
static _Thread_local char *volatile passing_on IN_STATIC_TLS; /* stack position at the call, or NULL */
static _Thread_local volatile int times_nested IN_STATIC_TLS;

enum { MAX_NESTED = 4 };
enum { MAX_TRIES = 1000 }; /* a fork may have copied the flag while it was set */

static struct sigaction handlers_before[2]; /* one is in use while the other is written */
static atomic_int handler_in_use;
static atomic_flag is_installing = ATOMIC_FLAG_INIT;

static void give_up(int number)
{
    struct sigaction standard = {.sa_handler = SIG_DFL};
    sigaction(number, &standard, NULL);
}

/* Whether a handler that we passed a signal to is still running in this thread and caused this signal:
   by raising it again, or by repeatedly faulting itself. A handler that was left by a longjmp is no
   longer running, and its part of the stack may have been reused. */
static int is_nested(char *here, int is_sent)
{
    if (passing_on == NULL || here >= passing_on) {
        times_nested = 0;
        return 0;
    }
    return is_sent || ++times_nested > MAX_NESTED;
}

static void pass_on(int number, siginfo_t *info, void *context)
{
    char here;
    struct sigaction *known = &handlers_before[atomic_load(&handler_in_use)], next = *known;
    int is_sent = info == NULL || info->si_code <= 0; /* sent by a process, so it will not recur */
    int has_info = (next.sa_flags & SA_SIGINFO) != 0;
    if (!has_info && next.sa_handler == SIG_IGN && is_sent)
        return;
    if ((!has_info && (next.sa_handler == SIG_DFL || next.sa_handler == SIG_IGN)) ||
        is_nested(&here, is_sent)) {
        give_up(number);
        if (is_sent)
            raise(number);
        return; /* the fault happens again, now with the default action */
    }
    if (next.sa_flags & (int)SA_RESETHAND)
        *known = (struct sigaction){.sa_handler = SIG_DFL}; /* to be called only once */
    char *volatile outer = passing_on;
    passing_on = &here;
    if (has_info)
        next.sa_sigaction(number, info, context);
    else
        next.sa_handler(number);
    passing_on = outer;
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    Guard *guard = guard_here;
    if (guard != NULL && info != NULL && info->si_code > 0) {
        const uint8_t *at = info->si_addr;
        if (at >= guard->begin && at < guard->end) {
            guard_here = NULL;
            siglongjmp(guard->back, 1);
        }
    }
    pass_on(number, info, context);
}

static int is_installed(struct sigaction *now)
{
    return sigaction(SIGBUS, NULL, now) == 0 && (now->sa_flags & SA_SIGINFO) &&
           now->sa_sigaction == on_bus_error;
}

/* Install our handler in front of any other. A thread may have been started with all signals blocked;
   then a fault would kill the process without calling any handler. */
static void install_guard(void)
{
    static _Thread_local int is_unblocked;
    struct sigaction now;
    if (!is_unblocked) {
        sigset_t one;
        sigemptyset(&one);
        sigaddset(&one, SIGBUS);
        is_unblocked = pthread_sigmask(SIG_UNBLOCK, &one, NULL) == 0;
    }
    for (int tries = 0; tries < MAX_TRIES && !is_installed(&now); tries++) {
        if (atomic_flag_test_and_set(&is_installing)) {
            sched_yield();
            continue;
        }
        if (!is_installed(&now)) {
            struct sigaction ours = {.sa_sigaction = on_bus_error,
                                     .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
            int other = 1 - atomic_load(&handler_in_use);
            handlers_before[other] = now;
            atomic_store(&handler_in_use, other);
            sigaction(SIGBUS, &ours, NULL);
        }
        atomic_flag_clear(&is_installing);
    }
}

/* Do `work`; return 0 if a page could not be read, in which case the rest of the work was not done. The
   work must not hold a lock or own memory that a jump would leak. This thread has installed the guard. */
static NOINLINE int guarded(const File *file, void (*work)(void *), void *data)
{
    const uint8_t *map = file->mirror ? file->mirror->map : file->map;
    Guard guard = {.begin = map, .end = map + file->map_nbytes};
    if (map == NULL) {
        work(data);
        return 1;
    }
    if (sigsetjmp(guard.back, 0))
        return 0;
    passing_on = NULL; /* a handler may have been left by a longjmp */
    guard_here = &guard;
    atomic_signal_fence(memory_order_seq_cst);
    work(data);
    atomic_signal_fence(memory_order_seq_cst);
    guard_here = NULL;
    return 1;
}
