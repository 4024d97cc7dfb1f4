/* Requests for the next batch, or for given samples, which any thread may also read immediately. */

/* Request a batch of given samples: the first argument, an array that must not change any more. slots.py
   defines when its turn comes. Returns False if Python has to request it, say to report invalid samples. */
static Object *give(Object *self, Object *const *arguments, intptr_t count)
{
    (void)count;
    Turns *t = (void *)PyByteArray_AsString(self);
    Buffer buffer;
    int64_t serial = t->asked > t->assigned ? t->asked : t->assigned;
    int64_t behind_loop = t->next + t->num_slots - (t->held >= 0), at = t->given_end % MAX_GIVEN;
    if (t->loops && behind_loop > serial)
        serial = behind_loop;
    if (!t->is_lent || t->is_inside || t->given_end - t->given_begin >= MAX_GIVEN - 1)
        return PyBool_FromLong(0);
    if (PyObject_GetBuffer(arguments[0], &buffer, IN_C_ORDER) != 0) {
        PyErr_Clear();
        return PyBool_FromLong(0);
    }
    int is_good = are_samples(&buffer, t->queue->jobs[0].rows, t->num_samples);
    if (is_good) {
        Py_IncRef(arguments[0]);
        PyList_SetItem(t->samples, at, arguments[0]);
        t->given[at] = (Given){serial, buffer.nbytes / 8, buffer.memory};
        t->given_end++, t->asked = serial + 1;
        find_next(t);
        submit_next(t);
    }
    PyBuffer_Release(&buffer);
    return PyBool_FromLong(is_good);
}

/* Request one more batch. Returns 0 if it is left to Python, 2 if it is the last of its epoch, else 1. */
static Object *ask(Object *self, Object *const *arguments, intptr_t count)
{
    (void)arguments, (void)count;
    Turns *t = (void *)PyByteArray_AsString(self);
    if (!t->is_lent || in_run(t, t->asked) >= t->stop)
        return PyLong_FromLongLong(0);
    int is_given = given_of(t, t->asked) != NULL; /* if a loop has read ahead */
    int64_t is_last = !is_given && place_of(t, in_run(t, t->asked)).is_last;
    t->asked++;
    submit_next(t);
    return PyLong_FromLongLong(1 + is_last);
}

/* Fill the batch with this serial, which was submitted as the consumer's own, if it is cheap. Only while
   the state is not lent. Returns whether it did. */
static Object *fill_own(Object *self, Object *const *arguments, intptr_t count)
{
    (void)count;
    Turns *t = (void *)PyByteArray_AsString(self);
    int64_t serial = PyLong_AsLongLong(arguments[0]);
    if (t->is_lent || t->is_inside || t->waits_not || !t->is_open)
        return PyBool_FromLong(0);
    t->is_inside = 1; /* so that nothing is freed meanwhile */
    void *thread = PyEval_SaveThread();
    int is_filled = fill_own_job(t->queue, t->worker, serial);
    PyEval_RestoreThread(thread);
    t->is_inside = 0;
    return tell_left(t) ? PyBool_FromLong(is_filled) : NULL;
}

/* Point the targets of a plan at new arrays of `count` samples. Returns the arrays by name, and appends to
   the list `meanwhile` those only needed while reading. Returns NULL if memory allocation fails. */
static Object *new_targets(const Turns *t, Target *targets, int64_t count, Object *meanwhile)
{
    Object *arrays = PyDict_New();
    for (intptr_t i = 0; arrays != NULL && i < PyTuple_Size(t->fields); i++) {
        Object *of = PyTuple_GetItem(t->fields, i), *raw = NULL;
        Target *target = &targets[i];
        Object *out = new_array(t->array, count, PyTuple_GetItem(of, 1), PyTuple_GetItem(of, 2), &target->out);
        target->raw = target->out, target->is_wanted = 1, target->capacity = count;
        int is_made = out && PyDict_SetItem(arrays, PyTuple_GetItem(of, 0), out) == 0;
        if (is_made && PyTuple_Size(of) > 3) {
            raw = new_array(t->array, count, PyTuple_GetItem(of, 3), PyTuple_GetItem(of, 4), &target->raw);
            is_made = raw && PyList_Append(meanwhile, raw) == 0;
        }
        Py_DecRef(out), Py_DecRef(raw);
        if (!is_made)
            Py_DecRef(arrays), arrays = NULL;
    }
    return arrays;
}

/* Read samples into new arrays with `own`, an entry of `spare` that no other call uses. Returns the arrays
   by name; NULL, without an exception, if Python has to read them. */
static Object *read_with(Turns *t, Object *own, const Buffer *samples)
{
    BatchPlan *plan = (void *)(intptr_t)PyLong_AsLongLong(PyTuple_GetItem(own, 0));
    Target *targets = (void *)(intptr_t)PyLong_AsLongLong(PyTuple_GetItem(own, 1));
    Worker *worker = (void *)(intptr_t)PyLong_AsLongLong(PyTuple_GetItem(own, 2));
    int64_t count = samples->nbytes / 8, is_read = 0;
    const Queue *queue = t->queue;
    Object *meanwhile = PyList_New(0);
    Object *arrays = meanwhile && !worker->trace ? new_targets(t, targets, count, meanwhile) : NULL;
    if (arrays != NULL && t->is_open) { /* collecting garbage may close a reader */
        t->num_reading++;
        void *thread = PyEval_SaveThread();
        is_read = h5async_read_samples(plan, queue->fields, targets, queue->sources, worker, samples->memory,
                                       t->draw, queue->num_fields, count, queue->num_samples);
        PyEval_RestoreThread(thread);
        t->num_reading--;
    }
    Py_DecRef(meanwhile);
    PyErr_Clear();
    if (is_read)
        return arrays;
    Py_DecRef(arrays);
    return NULL;
}

/* Read samples immediately, in any thread: the first argument, an array that must not change any more.
   Returns a batch that owns its memory, or False if Python has to read them. */
static Object *read_at_once(Object *self, Object *const *arguments, intptr_t count)
{
    (void)count;
    Turns *t = (void *)PyByteArray_AsString(self);
    intptr_t last = t->is_open && t->fields ? PyList_Size(t->spare) - 1 : -1;
    Buffer buffer;
    if (last < 0 || PyObject_GetBuffer(arguments[0], &buffer, IN_C_ORDER) != 0) {
        PyErr_Clear();
        return PyBool_FromLong(0);
    }
    Object *batch = NULL, *own = NULL, *arrays = NULL;
    Object *size = PyLong_FromLongLong(buffer.nbytes / 8);
    if (size && are_samples(&buffer, t->queue->jobs[0].rows, t->num_samples)) {
        own = PyList_GetItem(t->spare, last);
        Py_IncRef(own);
        PyList_SetSlice(t->spare, last, last + 1, NULL);
        arrays = read_with(t, own, &buffer);
        PyList_Append(t->spare, own);
    }
    if (arrays != NULL)
        batch = batch_of(t, t->lasting, size, arguments[0], arrays);
    PyBuffer_Release(&buffer);
    Py_DecRef(size), Py_DecRef(own), Py_DecRef(arrays);
    PyErr_Clear();
    if (tell_left(t))
        return batch ? batch : PyBool_FromLong(0);
    Py_DecRef(batch);
    return NULL;
}

static Method TURNS[] = {{"take", take, METH_FASTCALL, NULL},
                         {"ask", ask, METH_FASTCALL, NULL},
                         {"give", give, METH_FASTCALL, NULL},
                         {"put_back", put_back, METH_FASTCALL, NULL},
                         {"fill_own", fill_own, METH_FASTCALL, NULL},
                         {"read", read_at_once, METH_FASTCALL, NULL},
                         {"deliver", deliver, METH_FASTCALL, NULL}};

/* Return these as Python functions, in this order, bound to a bytearray that holds a Turns. */
PUBLIC Object *h5async_turns_of(Object *memory)
{
    enum { COUNT = sizeof TURNS / sizeof *TURNS };
    Object *made[COUNT], *all = NULL;
    int are_made = 1;
    for (int i = 0; i < COUNT; i++)
        are_made &= (made[i] = PyCFunction_NewEx(&TURNS[i], memory, NULL)) != NULL;
    if (are_made)
        all = PyTuple_Pack(COUNT, made[0], made[1], made[2], made[3], made[4], made[5], made[6]);
    for (int i = 0; i < COUNT; i++)
        Py_DecRef(made[i]);
    return all;
}
