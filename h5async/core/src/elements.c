/* Reads items of elements of variable length, as heap.c does, out of the heaps of their files. */

static const Heap *heap_of_item(const Work *work, const Item *item)
{
    const Field *f = &work->fields[item->field];
    return &f->heaps[f->layers[item->layer].begin[item->segment]];
}

static int read_heap_item(Work *work, const Field *f, const Target *target, const Item *item)
{
    HeapScratch *scratch = heap_scratch(work->w);
    HeapCall call = {.heap = heap_of_item(work, item), .file = work->file, .w = work->w,
                     .scratch = scratch, .count = item->num_runs, .out = target->raw,
                     .element = work->plan->run_local + item->first_run,
                     .position = work->plan->run_position + item->first_run,
                     .out_nbytes = target->capacity * f->row_nbytes,
                     .available = work->available, .file_nbytes = nbytes_of_file(work->file)};
    if (scratch == NULL || call.count > BLOCK_SEQUENCES)
        return fail(work->w, NO_ROOM, -1, 0, (int64_t)sizeof(HeapScratch));
    call.ordered = scratch->ordered;
    find_and_copy(&call);
    end_stage(work->w, READING, &work->last_ns);
    return call.failed == call.count;
}

/* Where the first element of an item lies that has values; -1: none has any. */
static int64_t offset_of_elements(const Work *work, const Item *item)
{
    const Heap *h = heap_of_item(work, item);
    int64_t offset = -1;
    for (int64_t i = 0; offset < 0 && i < item->num_runs; i++)
        offset = offset_of_element(h, work->plan->run_local[item->first_run + i]);
    return offset;
}

/* Ask the system for the elements of an item. Large ones are mostly the first of their collection. */
static void ask_for_elements(const Work *work, const Item *item, Span *span)
{
    const Heap *h = heap_of_item(work, item);
    for (int64_t i = 0; i < item->num_runs; i++) {
        int64_t number = work->plan->run_local[item->first_run + i];
        int64_t offset = offset_of_element(h, number);
        if (offset < 0)
            continue;
        int64_t nbytes = h->length[number] * h->value_nbytes;
        if (get_place(h, number) < 0) {
            nbytes += COLLECTION_HEAD + OBJECT_HEAD;
            nbytes = nbytes < HEAP_WINDOW ? HEAP_WINDOW : nbytes;
        }
        ask_later(work->file, span, offset, nbytes);
    }
}
