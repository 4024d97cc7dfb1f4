/* Makes Python objects. Declares the functions of Python's stable ABI that it uses, so that no header ties
   a build to one version of Python. */

typedef struct Object Object;
typedef struct {
    const char *name;
    Object *(*function)(Object *self, Object *const *arguments, intptr_t count);
    int flags;
    const char *doc;
} Method;
extern Object *PyCFunction_NewEx(Method *method, Object *self, Object *module);
extern char *PyByteArray_AsString(Object *array);
extern Object *PyType_GenericAlloc(Object *type, intptr_t count);
extern Object *PyTuple_Pack(intptr_t count, ...);
extern Object *PyTuple_GetItem(Object *tuple, intptr_t at);
extern intptr_t PyTuple_Size(Object *tuple);
extern Object *PyDict_New(void);
extern int PyDict_SetItem(Object *dict, Object *key, Object *value);
extern Object *PySlice_New(Object *start, Object *stop, Object *step);
extern Object *PyObject_GetItem(Object *object, Object *key);
extern Object *PySequence_Concat(Object *one, Object *other);
extern void PyErr_Clear(void);
extern void PyErr_Fetch(Object **type, Object **value, Object **traceback);
extern void PyErr_Restore(Object *type, Object *value, Object *traceback);
extern Object *PyLong_FromLongLong(long long value);
extern long long PyLong_AsLongLong(Object *object);
extern Object *PyBool_FromLong(long value);
extern Object *Py_BuildValue(const char *format, ...);
extern Object *PyObject_CallFunctionObjArgs(Object *function, ...);
extern int PyObject_SetAttr(Object *object, Object *name, Object *value);
extern Object *PyList_New(intptr_t size);
extern int PyList_Append(Object *list, Object *item);
extern Object *PyList_GetItem(Object *list, intptr_t at);
extern int PyList_SetItem(Object *list, intptr_t at, Object *item);
extern intptr_t PyList_Size(Object *list);
extern int PyList_SetSlice(Object *list, intptr_t low, intptr_t high, Object *items);
typedef struct { /* Py_buffer */
    void *memory;
    Object *owner;
    intptr_t nbytes, itemsize;
    int is_readonly, rank;
    char *format;
    intptr_t *shape, *strides, *suboffsets;
    void *internal;
} Buffer;
extern int PyObject_GetBuffer(Object *object, Buffer *buffer, int flags);
extern void PyBuffer_Release(Buffer *buffer);
extern void Py_IncRef(Object *object);
extern void Py_DecRef(Object *object);
extern int PyErr_CheckSignals(void);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *thread);
enum { METH_FASTCALL = 0x80, METH_NOARGS = 0x4 };
enum { IN_C_ORDER = 0x4 | 0x8 /* PyBUF_FORMAT | PyBUF_ND */ };

/* Whether a buffer is a non-empty one-dimensional int64 array of at most `most_rows` valid sample numbers. */
static int are_samples(const Buffer *buffer, int64_t most_rows, int64_t num_samples)
{
    uint64_t most = 0;
    const char *format = buffer->format;
    if (buffer->rank != 1 || buffer->itemsize != 8 || !(*format == 'l' || *format == 'q') || format[1] ||
        buffer->nbytes == 0 || buffer->nbytes / 8 > most_rows)
        return 0;
    for (int64_t i = 0; i < buffer->nbytes / 8; i++)
        most = ((const uint64_t *)buffer->memory)[i] > most ? ((const uint64_t *)buffer->memory)[i] : most;
    return most < (uint64_t)num_samples; /* and none is below 0 */
}

/* Return a new NumPy array (`type`) of shape (rows, *row) and a dtype, and set `memory` to its data. Returns
   NULL, with an exception set, on failure. */
static Object *new_array(Object *type, int64_t rows, Object *row, Object *dtype, uint8_t **memory)
{
    Object *count = PyLong_FromLongLong(rows), *first = count ? PyTuple_Pack(1, count) : NULL;
    Object *shape = first ? PySequence_Concat(first, row) : NULL;
    Object *array = shape ? PyObject_CallFunctionObjArgs(type, shape, dtype, NULL) : NULL;
    Buffer buffer;
    int is_made = array && PyObject_GetBuffer(array, &buffer, 0) == 0;
    Py_DecRef(count), Py_DecRef(first), Py_DecRef(shape);
    if (!is_made)
        return Py_DecRef(array), NULL;
    *memory = buffer.memory;
    PyBuffer_Release(&buffer);
    return array;
}

static Object *new_part(int64_t count)
{
    Object *end = PyLong_FromLongLong(count), *part = end ? PySlice_New(NULL, end, NULL) : NULL;
    Py_DecRef(end);
    return part;
}

/* Set attributes from `pairs`, a tuple of alternating names and values; if `part` is not NULL, each is set
   to its value indexed by `part`. */
static int set_members(Object *made, Object *pairs, Object *part)
{
    int are_set = 1;
    for (intptr_t i = 0, count = PyTuple_Size(pairs); are_set && i < count; i += 2) {
        Object *value = PyTuple_GetItem(pairs, i + 1);
        if (part)
            value = PyObject_GetItem(value, part);
        are_set = value && PyObject_SetAttr(made, PyTuple_GetItem(pairs, i), value) == 0;
        if (part)
            Py_DecRef(value);
    }
    return are_set;
}

/* Return an object for samples described by several arrays; see FieldKind.views. */
static Object *new_samples(Object *of, int64_t count)
{
    const int64_t *where = (const int64_t *)(intptr_t)PyLong_AsLongLong(PyTuple_GetItem(of, 0));
    Object *made = PyType_GenericAlloc(PyTuple_GetItem(of, 1), 0);
    Object *rows = new_part(where[count]), *offsets = new_part(count + 1);
    int is_made = made && rows && offsets && set_members(made, PyTuple_GetItem(of, 2), NULL) &&
                  set_members(made, PyTuple_GetItem(of, 3), rows) &&
                  set_members(made, PyTuple_GetItem(of, 4), offsets);
    Py_DecRef(rows), Py_DecRef(offsets);
    if (!is_made)
        Py_DecRef(made);
    return is_made ? made : NULL;
}

/* Return a dict of the views of fields (see FieldKind.views) for `count` samples; `whole` is the matching
   slice, or NULL. Returns NULL, without an exception, on failure. */
static Object *new_views(Object *names, Object *fields, Object *whole, int64_t count)
{
    Object *views = PyDict_New(), *part = whole ? whole : new_part(count);
    int are_made = views && part;
    for (intptr_t i = 0; are_made && i < PyTuple_Size(fields); i++) {
        Object *of = PyTuple_GetItem(fields, i);
        Object *view = PyTuple_Size(of) == 1 ? PyObject_GetItem(PyTuple_GetItem(of, 0), part)
                                             : new_samples(of, count);
        are_made = view != NULL && PyDict_SetItem(views, PyTuple_GetItem(names, i), view) == 0;
        Py_DecRef(view);
    }
    if (part != whole)
        Py_DecRef(part);
    if (are_made)
        return views;
    PyErr_Clear();
    Py_DecRef(views);
    return NULL;
}
