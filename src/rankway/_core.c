/* The compiled core: block hashes, the index, the active blocks and the choice, as classes and functions of Python.
 *
 * Its spec and oracle are the pure twins: rankway/blocks.py, index.py and choice.py give the same results and raise the same
 * classes of errors. This file converts arguments and guards against other threads; the work is in the headers:
 *   _core_hash.h -> _core_table.h, _core_rows.h -> _core_holders.h -> _core_match.h -> _core_choice.h
 *
 * Threads: short calls keep the GIL and need no lock. Long ones release it and mark their object busy meanwhile; whoever comes
 * then waits. Arguments are converted before a call touches the tables, since conversion can run any Python code.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_core_choice.h"

#define ITEMS_AHEAD 64 /* numbers of a list between a prefetch and its use */
#define LONG_BLOCKS 16384 /* from this many blocks on (about 0.3 ms) the GIL is released */

/* ---- Arguments. */

/* Takes positional and keyword arguments apart; false: TypeError set. The last `total - required` may be missing (NULL). */
static bool bind(const char *function, const char *const *names, int required, int total, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *keywords, PyObject **bound)
{
    if (nargs > total) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d arguments (%zd given)", function, total, nargs);
        return false;
    }
    for (int i = 0; i < total; i++)
        bound[i] = i < nargs ? args[i] : NULL;
    for (Py_ssize_t k = 0; keywords && k < PyTuple_GET_SIZE(keywords); k++) {
        PyObject *keyword = PyTuple_GET_ITEM(keywords, k);
        int i = 0;
        while (i < total && PyUnicode_CompareWithASCIIString(keyword, names[i]))
            i++;
        if (i == total || bound[i]) {
            PyErr_Format(PyExc_TypeError, "%s() got %s keyword argument '%U'", function, i == total ? "an unexpected" : "a repeated",
                         keyword);
            return false;
        }
        bound[i] = args[nargs + k];
    }
    for (int i = 0; i < required; i++)
        if (!bound[i]) {
            PyErr_Format(PyExc_TypeError, "%s() misses argument '%s'", function, names[i]);
            return false;
        }
    return true;
}

/* A whole number that fits 64 bits, clipped to them; false: TypeError set. */
static bool as_int64(PyObject *object, int64_t *value)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (number == -1 && !overflow && PyErr_Occurred())
        return false;
    *value = overflow > 0 ? INT64_MAX : overflow < 0 ? INT64_MIN : number;
    return true;
}

static bool as_slot(PyObject *object, uint32_t *slot)
{
    int64_t value;
    if (!as_int64(object, &value))
        return false;
    if (value < 0 || value >= MAX_SLOTS) {
        PyErr_Format(PyExc_ValueError, "slot=%R: must be 0 %s %u", object, "…", MAX_SLOTS - 1);
        return false;
    }
    *slot = (uint32_t)value;
    return true;
}

static bool as_block_size(PyObject *object, int64_t *block_size)
{
    if (!as_int64(object, block_size))
        return false;
    if (*block_size < 1) {
        PyErr_Format(PyExc_ValueError, "block_size=%R: must be at least 1", object);
        return false;
    }
    return true;
}

static bool as_root(PyObject *object, uint64_t *root)
{
    PyObject *number = PyNumber_Index(object);
    if (!number)
        return false;
    *root = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (!PyErr_Occurred())
        return true;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "root=%R: must be 0 %s 2^64-1", object, "…");
    return false;
}

/* Numbers of 4 or 8 bytes (tokens, hashes), borrowed from a buffer or converted from a sequence. */
typedef struct {
    const byte *data;
    size_t count;
    Py_buffer view; /* .obj NULL: none */
    byte *owned;
} Numbers;

static void numbers_close(Numbers *n)
{
    PyBuffer_Release(&n->view);
    PyMem_RawFree(n->owned);
    n->owned = NULL;
}

/* Turns a TypeError or an OverflowError of a conversion into the twins' ValueError. */
static void refuse_number(size_t width)
{
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_OverflowError))
        return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyErr_Format(PyExc_ValueError, "not all are whole numbers of %zu bits: %S", 8 * width, value);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
}

static bool number_slow(PyObject *item, size_t width, uint64_t *value)
{
    PyObject *number = PyNumber_Index(item);
    if (!number)
        return false;
    *value = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (*value == UINT64_MAX && PyErr_Occurred())
        return false;
    if (width == 4 && *value > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "too large");
        return false;
    }
    return true;
}

/* Reads small ints without a call; false: not one of those. */
static inline bool number_fast(PyObject *item, size_t width, uint64_t *value)
{
    if (!PyLong_CheckExact(item))
        return false;
#if PY_VERSION_HEX >= 0x030C0000
    if (!PyUnstable_Long_IsCompact((PyLongObject *)item))
        return false;
    Py_ssize_t number = PyUnstable_Long_CompactValue((PyLongObject *)item);
    *value = (uint64_t)number;
    return number >= 0 && (width == 8 || (uint64_t)number <= UINT32_MAX);
#else
    const digit *digits = ((PyLongObject *)item)->ob_digit;
    Py_ssize_t size = Py_SIZE(item);
    if (size == 1 || size == 0)
        *value = size ? digits[0] : 0;
    else if (size == 2)
        *value = digits[0] | (uint64_t)digits[1] << PyLong_SHIFT;
    else if (size == 3 && PyLong_SHIFT == 30 && digits[2] < 16)
        *value = digits[0] | (uint64_t)digits[1] << 30 | (uint64_t)digits[2] << 60;
    else
        return false;
    return width == 8 || *value <= UINT32_MAX;
#endif
}

static inline __attribute__((always_inline)) bool numbers_of_items(Numbers *n, PyObject *sequence, size_t width)
{
    size_t count = (size_t)PySequence_Fast_GET_SIZE(sequence);
    n->owned = PyMem_RawMalloc(count ? count * width : 1);
    if (!n->owned) {
        PyErr_NoMemory();
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        size_t size = (size_t)PySequence_Fast_GET_SIZE(sequence);
        if (i >= size) { /* an __index__ has shortened the list */
            PyErr_SetString(PyExc_ValueError, "the list changed while it was read");
            return false;
        }
        PyObject **items = PySequence_Fast_ITEMS(sequence), *item = items[i];
        if (i + ITEMS_AHEAD < size)
            __builtin_prefetch(items[i + ITEMS_AHEAD]);
        uint64_t value;
        if (!number_fast(item, width, &value)) {
            Py_INCREF(item);
            bool ok = number_slow(item, width, &value);
            Py_DECREF(item);
            if (!ok) {
                refuse_number(width);
                return false;
            }
        }
        memcpy(n->owned + i * width, &value, width); /* little-endian: the low bytes come first */
    }
    n->data = n->owned;
    n->count = count;
    return true;
}

static bool numbers_packed(Numbers *n, PyObject *object, size_t width)
{
    if (PyObject_GetBuffer(object, &n->view, PyBUF_SIMPLE)) {
        PyErr_Clear(); /* a memoryview with steps: copy */
        PyObject *copy = PyBytes_FromObject(object);
        if (!copy || PyObject_GetBuffer(copy, &n->view, PyBUF_SIMPLE)) {
            Py_XDECREF(copy);
            return false;
        }
        Py_DECREF(copy); /* the view keeps it */
    }
    if ((size_t)n->view.len % width) {
        PyErr_Format(PyExc_ValueError, "packed length %zd is no multiple of %zu", n->view.len, width);
        return false;
    }
    n->data = n->view.buf;
    n->count = (size_t)n->view.len / width;
    return true;
}

/* Whether an array's items are unsigned numbers of `width` bytes; then it is borrowed. */
/* Whether a buffer is an array, of native byte order, of items of a size and one of these format letters. */
static bool is_array(const Py_buffer *view, const char *letters, size_t width)
{
    const char *format = view->format ? view->format : "B";
    format += *format == '<' || *format == '=' || *format == '@';
    return view->ndim == 1 && (size_t)view->itemsize == width && *format && strchr(letters, *format) && !format[1];
}

static bool numbers_array(Numbers *n, PyObject *object, size_t width)
{
    if (!PyObject_CheckBuffer(object))
        return false;
    if (PyObject_GetBuffer(object, &n->view, PyBUF_FORMAT | PyBUF_ND)) {
        PyErr_Clear();
        return false;
    }
    if (is_array(&n->view, "ILQ", width)) {
        n->data = n->view.buf;
        n->count = (size_t)n->view.shape[0];
        return true;
    }
    PyBuffer_Release(&n->view);
    return false;
}

/* Opens tokens (width 4) or hashes (width 8) of any of the accepted kinds; false: an error is set, and nothing is to be closed. */
static bool numbers_open(Numbers *n, PyObject *object, size_t width)
{
    bool ok;
    n->view.obj = NULL;
    n->owned = NULL;
    if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
        ok = width == 4 ? numbers_of_items(n, object, 4) : numbers_of_items(n, object, 8);
    } else if (PyBytes_Check(object) || PyByteArray_Check(object) || PyMemoryView_Check(object)) {
        ok = numbers_packed(n, object, width);
    } else if (numbers_array(n, object, width)) {
        ok = true;
    } else {
        PyObject *list = NULL;
        if (PyUnicode_Check(object))
            PyErr_SetString(PyExc_TypeError, "text");
        else
            list = PySequence_List(object);
        if (!list)
            refuse_number(width);
        ok = list && (width == 4 ? numbers_of_items(n, list, 4) : numbers_of_items(n, list, 8));
        Py_XDECREF(list);
    }
    if (!ok)
        numbers_close(n);
    return ok;
}

/* ---- The hash chain. */

/* Hashes full blocks of tokens into `out`. */
static void chain_blocks(const byte *tokens, size_t blocks, size_t stride, uint64_t h, byte *out)
{
    for (size_t i = 0; i < blocks; i++) {
        const byte *block = tokens + stride * i;
        __builtin_prefetch(block + 2048); /* a long prompt comes from memory, and the chain leaves no slack to wait for it */
        h = stride == 64 ? xxh64(block, 64, h) : xxh64(block, stride, h);
        store64(out + 8 * i, h);
    }
}

/* The same with extra bytes after the tokens of each block; false: an error is set. */
static bool chain_with_keys(const byte *tokens, size_t blocks, size_t stride, uint64_t h, byte *out, PyObject *keys)
{
    size_t room = 0;
    byte *block = NULL;
    for (size_t i = 0; i < blocks; i++) {
        PyObject *key = PySequence_GetItem(keys, (Py_ssize_t)i);
        Py_buffer extra;
        bool ok = key && !PyObject_GetBuffer(key, &extra, PyBUF_SIMPLE);
        Py_XDECREF(key);
        if (!ok)
            break;
        size_t length = stride + (size_t)extra.len;
        if (length > room) {
            byte *wider = PyMem_RawRealloc(block, length);
            if (!wider) {
                PyBuffer_Release(&extra);
                PyErr_NoMemory();
                break;
            }
            block = wider;
            room = length;
        }
        memcpy(block, tokens + stride * i, stride);
        memcpy(block + stride, extra.buf, (size_t)extra.len);
        PyBuffer_Release(&extra);
        h = xxh64(block, length, h);
        store64(out + 8 * i, h);
    }
    PyMem_RawFree(block);
    return !PyErr_Occurred();
}

static size_t full_blocks(const Numbers *tokens, int64_t block_size) { return tokens->count / (uint64_t)block_size; }

static PyObject *core_hash_chain(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords)
{
    static const char *const names[] = {"tokens", "block_size", "root", "extra_keys"};
    PyObject *bound[4], *keys, *result;
    int64_t block_size;
    uint64_t root;
    Numbers tokens;
    if (!bind("hash_chain", names, 3, 4, args, nargs, keywords, bound) || !as_block_size(bound[1], &block_size) ||
        !as_root(bound[2], &root) || !numbers_open(&tokens, bound[0], 4))
        return NULL;
    keys = bound[3] && bound[3] != Py_None ? bound[3] : NULL;
    size_t blocks = full_blocks(&tokens, block_size), stride = 4 * (size_t)block_size;
    Py_ssize_t key_count = keys ? PyObject_Length(keys) : 0;
    result = NULL;
    if (key_count < 0)
        ;
    else if (keys && (size_t)key_count < blocks)
        PyErr_Format(PyExc_ValueError, "%zd extra keys for %zu blocks", key_count, blocks);
    else
        result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(8 * blocks));
    if (result) {
        byte *out = (byte *)PyBytes_AS_STRING(result);
        if (keys) {
            if (!chain_with_keys(tokens.data, blocks, stride, root, out, keys))
                Py_CLEAR(result);
        } else if (blocks >= LONG_BLOCKS) {
            Py_BEGIN_ALLOW_THREADS
            chain_blocks(tokens.data, blocks, stride, root, out);
            Py_END_ALLOW_THREADS
        } else {
            chain_blocks(tokens.data, blocks, stride, root, out);
        }
    }
    numbers_close(&tokens);
    return result;
}

/* ---- Index and ActiveBlocks: one struct, of which Index leaves the counts unused. */

typedef struct {
    PyObject_HEAD
    Holders holders;
    Table counts; /* (block, id) -> users; the id is the word's tag */
    PyThread_type_lock lock; /* held by whoever is busy without the GIL */
    bool busy;
} Blocks;

#define TAG_MASK ((uint64_t)MAX_SLOTS - 1)
#define ONE_USER ((uint64_t)MAX_SLOTS)

static PyTypeObject IndexType, ActiveBlocksType;

static bool make_secret(uint64_t secret[2])
{
    PyObject *os = PyImport_ImportModule("os");
    PyObject *random = os ? PyObject_CallMethod(os, "urandom", "i", 16) : NULL;
    bool ok = random && PyBytes_Check(random) && PyBytes_GET_SIZE(random) == 16;
    if (ok)
        memcpy(secret, PyBytes_AS_STRING(random), 16);
    Py_XDECREF(random);
    Py_XDECREF(os);
    return ok;
}

static PyObject *blocks_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    uint64_t secret[2];
    if (PyTuple_GET_SIZE(args) || (keywords && PyDict_GET_SIZE(keywords))) {
        PyErr_Format(PyExc_TypeError, "%s() takes no arguments", type->tp_name);
        return NULL;
    }
    if (!make_secret(secret))
        return NULL;
    Blocks *self = (Blocks *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    bool counted = PyType_IsSubtype(type, &ActiveBlocksType);
    self->lock = PyThread_allocate_lock();
    if (!self->lock || !holders_open(&self->holders, secret, counted ? &self->counts : NULL) ||
        (counted && !table_open(&self->counts, secret, TAG_MASK))) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void blocks_dealloc(Blocks *self)
{
    holders_close(&self->holders);
    table_close(&self->counts);
    if (self->lock)
        PyThread_free_lock(self->lock);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Waits until no other thread is in a long call. Afterwards the GIL protects the tables until it is released. */
static void wait_idle(Blocks *self)
{
    while (self->busy) {
        Py_BEGIN_ALLOW_THREADS
        PyThread_acquire_lock(self->lock, WAIT_LOCK);
        PyThread_release_lock(self->lock);
        Py_END_ALLOW_THREADS
    }
}

/* Begins work on idle tables, without the GIL if it is long. `leave` ends it. */
static PyThreadState *enter(Blocks *self, bool is_long)
{
    if (!is_long)
        return NULL;
    self->busy = true;
    PyThreadState *state = PyEval_SaveThread();
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    return state;
}

static void leave(Blocks *self, PyThreadState *state)
{
    if (!state)
        return;
    PyThread_release_lock(self->lock);
    PyEval_RestoreThread(state);
    self->busy = false;
}

typedef int64_t Change(Blocks *, uint32_t slot, const byte *hashes, size_t count);

/* A method (slot, hashes) -> how many changed. */
static PyObject *change(Blocks *self, const char *function, Change *work, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords)
{
    static const char *const names[] = {"slot", "hashes"};
    PyObject *bound[2];
    uint32_t slot;
    Numbers hashes;
    if (!bind(function, names, 2, 2, args, nargs, keywords, bound) || !numbers_open(&hashes, bound[1], 8))
        return NULL;
    if (!as_slot(bound[0], &slot)) {
        numbers_close(&hashes);
        return NULL;
    }
    wait_idle(self);
    PyThreadState *state = enter(self, hashes.count >= LONG_BLOCKS);
    int64_t changed = work(self, slot, hashes.data, hashes.count);
    leave(self, state);
    numbers_close(&hashes);
    return changed < 0 ? PyErr_NoMemory() : PyLong_FromLongLong(changed);
}

#define CHANGE_METHOD(name)                                                                                                 \
    static PyObject *blocks_##name(Blocks *self, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords)                 \
    {                                                                                                                       \
        return change(self, #name, work_##name, args, nargs, keywords);                                                     \
    }

static int64_t work_store(Blocks *self, uint32_t slot, const byte *hashes, size_t count)
{
    return holders_store(&self->holders, slot, hashes, count);
}

static int64_t work_remove(Blocks *self, uint32_t slot, const byte *hashes, size_t count)
{
    return holders_remove(&self->holders, slot, hashes, count);
}

static int64_t work_acquire(Blocks *self, uint32_t slot, const byte *hashes, size_t count)
{
    Holders *h = &self->holders;
    int64_t acquired = 0;
    upkeep(h, count);
    uint32_t id = id_for(h, slot);
    if (id == NOBODY)
        return -1;
    for (size_t i = 0; i < count; i++) {
        uint64_t key = load64(hashes + 8 * i);
        Bucket *home = table_home(&self->counts, key, id);
        Spot spot = table_find(home, key, id, TAG_MASK);
        if (spot.found) {
            spot.bucket->word[spot.entry] += ONE_USER;
            continue;
        }
        if (hold(h, id, table_home(&h->table, key, 0), key) == FAILED)
            return -1;
        if (!table_insert(&self->counts, home, spot, key, id | ONE_USER)) {
            let_go(h, id, table_home(&h->table, key, 0), key);
            return -1;
        }
        acquired++;
    }
    return acquired;
}

static int64_t work_release(Blocks *self, uint32_t slot, const byte *hashes, size_t count)
{
    Holders *h = &self->holders;
    int64_t released = 0;
    upkeep(h, count);
    uint32_t id = id_of(h, slot);
    if (id == NOBODY)
        return 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t key = load64(hashes + 8 * i);
        Spot spot = table_find(table_home(&self->counts, key, id), key, id, TAG_MASK);
        if (!spot.found)
            continue;
        uint64_t *users = &spot.bucket->word[spot.entry];
        if (*users >= 2 * ONE_USER) {
            *users -= ONE_USER;
            continue;
        }
        table_erase(&self->counts, spot);
        let_go(h, id, table_home(&h->table, key, 0), key);
        released++;
    }
    return released;
}

CHANGE_METHOD(store)
CHANGE_METHOD(remove)
CHANGE_METHOD(acquire)
CHANGE_METHOD(release)

static int64_t work_overlap(Blocks *self, uint32_t slot, const byte *hashes, size_t count)
{
    uint32_t id = id_of(&self->holders, slot);
    size_t run = 0;
    while (run < count && holds(&self->holders, id, load64(hashes + 8 * run)))
        run++;
    return (int64_t)run;
}

CHANGE_METHOD(overlap)

/* The slot that a call names, its tables idle; NULL with an error, or `nobody` for a slot without blocks. */
static const Slot *named_slot(Blocks *self, PyObject *object, uint32_t *outside)
{
    static const Slot nobody;
    if (!as_slot(object, outside))
        return NULL;
    wait_idle(self);
    uint32_t id = id_of(&self->holders, *outside);
    return id == NOBODY ? &nobody : &self->holders.slot[id];
}

static PyObject *blocks_clear(Blocks *self, PyObject *object)
{
    uint32_t outside;
    return named_slot(self, object, &outside) ? PyLong_FromSize_t(holders_clear(&self->holders, outside)) : NULL;
}

static PyObject *blocks_size(Blocks *self, PyObject *object)
{
    uint32_t outside;
    const Slot *slot = named_slot(self, object, &outside);
    return slot ? PyLong_FromUnsignedLong(slot->size) : NULL;
}

static PyObject *blocks_digest(Blocks *self, PyObject *object)
{
    uint32_t outside;
    const Slot *slot = named_slot(self, object, &outside);
    return slot ? PyLong_FromUnsignedLongLong(slot->digest) : NULL;
}

/* The blocks of slots: a list of bytes. */
static PyObject *blocks_of_slots(Blocks *self, const uint32_t *outside, Py_ssize_t count)
{
    Holders *h = &self->holders;
    PyObject *result = PyList_New(count);
    wait_idle(self);
    byte **out = PyMem_RawCalloc(h->slots + 1, sizeof *out);
    for (Py_ssize_t i = 0; result && out && i < count; i++) { /* from here on nothing may run that changes the index */
        uint32_t id = id_of(h, outside[i]);
        PyObject *bytes = PyBytes_FromStringAndSize(NULL, id == NOBODY ? 0 : 8 * (Py_ssize_t)h->slot[id].size);
        if (bytes)
            PyList_SET_ITEM(result, i, bytes);
        if (!bytes || (id != NOBODY && out[id])) {
            if (bytes)
                PyErr_Format(PyExc_ValueError, "slots: %lu is there twice", (unsigned long)outside[i]);
            Py_CLEAR(result);
        } else if (id != NOBODY) {
            out[id] = (byte *)PyBytes_AS_STRING(bytes);
        }
    }
    if (result && out) {
        PyThreadState *state = enter(self, h->table.entries >= LONG_BLOCKS);
        holders_blocks(h, out);
        leave(self, state);
    } else if (!out) {
        Py_CLEAR(result);
        PyErr_NoMemory();
    }
    PyMem_RawFree(out);
    return result;
}

static PyObject *blocks_blocks(Blocks *self, PyObject *object)
{
    uint32_t outside;
    const Slot *slot = named_slot(self, object, &outside);
    if (!slot || !slot->size)
        return slot ? PyBytes_FromStringAndSize(NULL, 0) : NULL;
    PyObject *list = blocks_of_slots(self, &outside, 1), *result = list ? Py_NewRef(PyList_GET_ITEM(list, 0)) : NULL;
    Py_XDECREF(list);
    return result;
}

static PyObject *blocks_blocks_of(Blocks *self, PyObject *object)
{
    PyObject *slots = PySequence_Tuple(object), *result = NULL;
    if (!slots)
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(slots), i = 0;
    uint32_t *outside = PyMem_RawMalloc((size_t)count * sizeof *outside + 1);
    while (outside && i < count && as_slot(PyTuple_GET_ITEM(slots, i), &outside[i]))
        i++;
    if (!outside)
        PyErr_NoMemory();
    else if (i == count)
        result = blocks_of_slots(self, outside, count);
    PyMem_RawFree(outside);
    Py_DECREF(slots);
    return result;
}

static PyObject *blocks_contains(Blocks *self, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords)
{
    static const char *const names[] = {"slot", "block_hash"};
    PyObject *bound[2];
    uint32_t outside;
    PyObject *number = bind("contains", names, 2, 2, args, nargs, keywords, bound) ? PyNumber_Index(bound[1]) : NULL;
    if (!number)
        return NULL;
    uint64_t key = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    bool possible = !PyErr_Occurred(); /* no block has a hash beyond 64 bits */
    PyErr_Clear();
    if (!as_slot(bound[0], &outside))
        return NULL;
    if (!possible)
        Py_RETURN_FALSE;
    wait_idle(self);
    return PyBool_FromLong(holds(&self->holders, id_of(&self->holders, outside), key));
}

static PyObject *blocks_memory_bytes(Blocks *self, PyObject *ignored)
{
    wait_idle(self);
    size_t counts = self->holders.counts ? table_bytes(&self->counts) : 0;
    return PyLong_FromSize_t(sizeof *self + holders_bytes(&self->holders) + counts);
}

static Py_ssize_t blocks_length(Blocks *self)
{
    wait_idle(self);
    PyThreadState *state = enter(self, self->holders.dying && self->holders.table.entries >= LONG_BLOCKS);
    finish_sweep(&self->holders);
    leave(self, state);
    return (Py_ssize_t)self->holders.table.entries;
}

/* Runs a match over hashes of any kind; false: an error is set, and nothing is to be closed. */
static bool match_object(Blocks *self, PyObject *object, Match *m)
{
    Numbers hashes;
    if (!numbers_open(&hashes, object, 8))
        return false;
    wait_idle(self);
    PyThreadState *state = enter(self, hashes.count >= LONG_BLOCKS);
    match_open(m, &self->holders);
    match_all(m, hashes.data, hashes.count);
    leave(self, state);
    numbers_close(&hashes);
    if (!m->failed)
        return true;
    match_close(m);
    PyErr_NoMemory();
    return false;
}

static PyObject *blocks_match(Blocks *self, PyObject *object)
{
    Match m;
    if (!match_object(self, object, &m))
        return NULL;
    PyObject *result = PyDict_New(), *depth = NULL;
    for (size_t i = 0; result && i < m.runs; i++) {
        if (!depth || m.run[i].depth != m.run[i - 1].depth) /* most have come as far as their neighbour */
            Py_XSETREF(depth, PyLong_FromUnsignedLong(m.run[i].depth));
        PyObject *slot = PyLong_FromUnsignedLong(m.run[i].slot);
        if (!slot || !depth || PyDict_SetItem(result, slot, depth))
            Py_CLEAR(result);
        Py_XDECREF(slot);
    }
    Py_XDECREF(depth);
    match_close(&m);
    return result;
}

/* Writes overlaps to a buffer of uint32, by slot. */
static void fill_buffer(const Match *m, uint32_t *overlaps, size_t slots)
{
    memset(overlaps, 0, 4 * slots);
    for (size_t i = 0; i < m->runs; i++)
        if (m->run[i].slot < slots)
            overlaps[m->run[i].slot] = m->run[i].depth;
}

/* Writes overlaps to any other mutable sequence; false: an error is set. */
static bool fill_sequence(const Match *m, PyObject *overlaps)
{
    Py_ssize_t slots = PySequence_Size(overlaps);
    uint32_t *filled = slots < 0 ? NULL : PyMem_RawMalloc(4 * (size_t)slots + 1);
    if (slots >= 0 && !filled)
        PyErr_NoMemory();
    if (filled)
        fill_buffer(m, filled, (size_t)slots);
    for (Py_ssize_t i = 0; filled && i < slots && !PyErr_Occurred(); i++) {
        PyObject *number = PyLong_FromUnsignedLong(filled[i]);
        if (number)
            PySequence_SetItem(overlaps, i, number);
        Py_XDECREF(number);
    }
    PyMem_RawFree(filled);
    return !PyErr_Occurred();
}

static PyObject *blocks_match_into(Blocks *self, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords)
{
    static const char *const names[] = {"hashes", "overlaps"};
    PyObject *bound[2];
    Match m;
    if (!bind("match_into", names, 2, 2, args, nargs, keywords, bound) || !match_object(self, bound[0], &m))
        return NULL;
    Py_buffer view;
    bool ok = true, is_buffer = !PyObject_GetBuffer(bound[1], &view, PyBUF_FORMAT | PyBUF_ND | PyBUF_WRITABLE);
    if (is_buffer && is_array(&view, "IL", 4))
        fill_buffer(&m, view.buf, (size_t)view.shape[0]);
    else {
        PyErr_Clear();
        ok = fill_sequence(&m, bound[1]);
    }
    if (is_buffer)
        PyBuffer_Release(&view);
    match_close(&m);
    if (!ok)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- The choice. */

static PyObject *choice_type; /* rankway.choice.Choice, a named tuple */
enum { ELIGIBLE, KNOWN, PREFILL_TOKENS, DECODE_BLOCKS, RECENT, COLUMNS };
static const char *const COLUMN_NAMES[COLUMNS] = {"eligible", "known", "prefill_tokens", "decode_blocks", "recent"};
static const char *const COLUMN_FORMATS[COLUMNS] = {"B", "B", "ql", "ql", "d"};
static const size_t COLUMN_WIDTHS[COLUMNS] = {1, 1, 8, 8, 8};
static PyObject *column_name[COLUMNS], *overlap_weight_name, *temperature_name;

static void columns_close(Py_buffer *column)
{
    for (int i = 0; i < COLUMNS; i++)
        PyBuffer_Release(&column[i]);
}

/* Borrows the columns of a LoadTable; false: an error is set, and nothing is to be closed. */
static bool columns_open(Py_buffer *column, PyObject *loads)
{
    for (int i = 0; i < COLUMNS; i++)
        column[i].obj = NULL;
    for (int i = 0; i < COLUMNS; i++) {
        PyObject *array = PyObject_GetAttr(loads, column_name[i]);
        bool ok = array && !PyObject_GetBuffer(array, &column[i], PyBUF_FORMAT | PyBUF_ND);
        Py_XDECREF(array);
        if (ok && (!is_array(&column[i], COLUMN_FORMATS[i], COLUMN_WIDTHS[i]) || column[i].shape[0] < column[0].shape[0])) {
            PyErr_Format(PyExc_ValueError, "loads.%s: must be an array of '%s' with an item a slot", COLUMN_NAMES[i],
                         COLUMN_FORMATS[i]);
            ok = false;
        }
        if (!ok) {
            columns_close(column);
            return false;
        }
    }
    return true;
}

static bool float_attribute(PyObject *object, PyObject *name, double *value)
{
    PyObject *number = PyObject_GetAttr(object, name);
    *value = number ? PyFloat_AsDouble(number) : -1;
    Py_XDECREF(number);
    return !PyErr_Occurred();
}

/* Finds Choice at the first choice: importing this module alone stays quick. False: an error is set. */
static bool find_choice_type(void)
{
    if (choice_type)
        return true;
    PyObject *module = PyImport_ImportModule("rankway.choice");
    PyObject *found = module ? PyObject_GetAttrString(module, "Choice") : NULL;
    Py_XDECREF(module);
    if (found && PyType_Check(found) && PyType_IsSubtype((PyTypeObject *)found, &PyTuple_Type)) {
        choice_type = found;
        return true;
    }
    if (found)
        PyErr_SetString(PyExc_TypeError, "rankway.choice.Choice is no tuple");
    Py_XDECREF(found);
    return false;
}

/* What both forms of the choice are given besides the prompt. */
typedef struct {
    Blocks *index, *active;
    Py_buffer column[COLUMNS];
    Prompt prompt;
} Choosing;

static bool choosing_open(Choosing *c, PyObject *index, PyObject *active, PyObject *block_size, PyObject *loads, PyObject *weights,
                          PyObject *seed)
{
    if (!find_choice_type())
        return false;
    if (!PyObject_TypeCheck(index, &IndexType) || !PyObject_TypeCheck(active, &ActiveBlocksType)) {
        PyErr_SetString(PyExc_TypeError, "index and active must be compiled ones");
        return false;
    }
    c->index = (Blocks *)index;
    c->active = (Blocks *)active;
    Prompt *p = &c->prompt;
    if (!as_block_size(block_size, &p->block_size) || !float_attribute(weights, overlap_weight_name, &p->overlap_weight) ||
        !float_attribute(weights, temperature_name, &p->temperature))
        return false;
    PyObject *bits = PyNumber_Index(seed);
    if (!bits)
        return false;
    p->seed = PyLong_AsUnsignedLongLongMask(bits);
    Py_DECREF(bits);
    if (PyErr_Occurred() || !columns_open(c->column, loads))
        return false;
    p->slots = (size_t)c->column[ELIGIBLE].shape[0];
    p->eligible = c->column[ELIGIBLE].buf;
    p->known = c->column[KNOWN].buf;
    p->prefill_tokens = c->column[PREFILL_TOKENS].buf;
    p->decode_blocks = c->column[DECODE_BLOCKS].buf;
    p->recent = c->column[RECENT].buf;
    return true;
}

static void choosing_wait(Choosing *c)
{
    while (c->index->busy || c->active->busy) {
        wait_idle(c->index);
        wait_idle(c->active);
    }
}

static PyObject *choice_object(const Candidate *picked)
{
    PyObject *fields = Py_BuildValue("((kdk))", (unsigned long)picked->slot, picked->cost, (unsigned long)picked->overlap);
    PyObject *choice = fields ? PyTuple_Type.tp_new((PyTypeObject *)choice_type, fields, NULL) : NULL;
    Py_XDECREF(fields);
    return choice;
}

/* Scores and picks: a Choice, None, or NULL with an error. */
static PyObject *pick_scored(const Choosing *c, const Match *cached, const Match *active)
{
    const Prompt *p = &c->prompt;
    const Holders *index = &c->index->holders;
    double *room = PyMem_RawMalloc(p->slots * (2 * sizeof(double) + 2 * sizeof(uint32_t)) + 1), *shares = room + p->slots;
    if (!room || cached->failed || active->failed) {
        PyMem_RawFree(room);
        return PyErr_NoMemory();
    }
    uint32_t *overlaps = (uint32_t *)(shares + p->slots);
    const Score score = {overlaps, overlaps + p->slots, room};
    fill_buffer(cached, score.cached, p->slots);
    fill_buffer(active, score.active, p->slots);
    score_all(p, &score);
    size_t slot = p->temperature > 0 ? sample(p, &score, index, shares) : cheapest(p, &score, index);
    PyObject *result;
    if (slot == p->slots) {
        result = Py_NewRef(Py_None);
    } else {
        int64_t overlap = overlap_of(p->known[slot] != 0, score.cached[slot], most_overlap(p));
        result = choice_object(&(Candidate){(uint32_t)slot, (uint32_t)overlap, score.cost[slot]});
    }
    PyMem_RawFree(room);
    return result;
}

/* Matches the prompt's blocks and picks. The tables are idle, and the GIL is held throughout. */
static PyObject *pick(Choosing *c, const byte *hashes, size_t blocks)
{
    Match cached, active;
    c->prompt.own_blocks = (int64_t)blocks;
    match_open(&cached, &c->index->holders);
    match_all(&cached, hashes, blocks);
    match_open(&active, &c->active->holders);
    match_all(&active, hashes, blocks);
    PyObject *result = pick_scored(c, &cached, &active);
    match_close(&cached);
    match_close(&active);
    return result;
}

static PyObject *core_choose(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords)
{
    static const char *const names[] = {"index", "active", "hashes", "prompt_tokens", "block_size", "loads", "weights", "seed"};
    PyObject *b[8], *result = NULL;
    Choosing c;
    Numbers hashes;
    if (!bind("choose", names, 8, 8, args, nargs, keywords, b) || !as_int64(b[3], &c.prompt.prompt_tokens) ||
        !numbers_open(&hashes, b[2], 8))
        return NULL;
    if (choosing_open(&c, b[0], b[1], b[4], b[5], b[6], b[7])) {
        choosing_wait(&c);
        result = pick(&c, hashes.data, hashes.count);
        columns_close(c.column);
    }
    numbers_close(&hashes);
    return result;
}

static PyObject *core_choose_for_tokens(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords)
{
    static const char *const names[] = {"index", "active", "tokens", "block_size", "root", "loads", "weights", "seed"};
    PyObject *b[8], *result = NULL;
    Choosing c;
    Numbers tokens;
    uint64_t root;
    if (!bind("choose_for_tokens", names, 8, 8, args, nargs, keywords, b) || !as_root(b[4], &root) || !numbers_open(&tokens, b[2], 4))
        return NULL;
    if (choosing_open(&c, b[0], b[1], b[3], b[5], b[6], b[7])) {
        size_t blocks = full_blocks(&tokens, c.prompt.block_size);
        PyObject *hashes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(8 * blocks)), *choice = NULL;
        if (hashes) {
            byte *out = (byte *)PyBytes_AS_STRING(hashes);
            c.prompt.prompt_tokens = (int64_t)tokens.count;
            choosing_wait(&c);
            chain_blocks(tokens.data, blocks, 4 * (size_t)c.prompt.block_size, root, out);
            choice = pick(&c, out, blocks);
        }
        if (choice)
            result = PyTuple_Pack(2, choice, hashes);
        Py_XDECREF(choice);
        Py_XDECREF(hashes);
        columns_close(c.column);
    }
    numbers_close(&tokens);
    return result;
}

/* ---- The module. */

#define METHOD(function) (PyCFunction)(void (*)(void))(function)
#define FAST (METH_FASTCALL | METH_KEYWORDS)

static PyMethodDef index_methods[] = {
    {"store", METHOD(blocks_store), FAST, "Add blocks; returns how many were new to the slot."},
    {"remove", METHOD(blocks_remove), FAST, "Take blocks away; returns how many the slot held."},
    {"clear", METHOD(blocks_clear), METH_O, "Forget the slot; returns how many blocks it held."},
    {"match", METHOD(blocks_match), METH_O, "Slot -> length of the run of leading blocks that it holds."},
    {"match_into", METHOD(blocks_match_into), FAST, "match into a buffer of uint32 indexed by slot."},
    {"size", METHOD(blocks_size), METH_O, "Blocks that the slot holds."},
    {"digest", METHOD(blocks_digest), METH_O, "XOR of mix over the slot's blocks."},
    {"blocks", METHOD(blocks_blocks), METH_O, "The slot's blocks, packed, in no order. Reads the whole table."},
    {"blocks_of", METHOD(blocks_blocks_of), METH_O, "The same of several slots, in one pass."},
    {"contains", METHOD(blocks_contains), FAST, "Whether the slot holds the block."},
    {"memory_bytes", METHOD(blocks_memory_bytes), METH_NOARGS, "Bytes that the index takes."},
    {NULL},
};

static PyMethodDef active_methods[] = {
    {"acquire", METHOD(blocks_acquire), FAST, "One more user of each block; returns how many became active."},
    {"release", METHOD(blocks_release), FAST, "One user less of each block; returns how many are no longer active."},
    {"active", METHOD(blocks_size), METH_O, "Distinct active blocks of the slot."},
    {"overlap", METHOD(blocks_overlap), FAST, "Leading blocks that are active on the slot."},
    {"clear", METHOD(blocks_clear), METH_O, "Forget the slot; returns how many blocks were active."},
    {NULL},
};

static PySequenceMethods index_sequence = {.sq_length = (lenfunc)blocks_length};

static PyTypeObject IndexType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "rankway._core.Index",
    .tp_doc = "A set of block hashes per slot: rankway.index.Index.",
    .tp_basicsize = sizeof(Blocks),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = blocks_new,
    .tp_dealloc = (destructor)blocks_dealloc,
    .tp_methods = index_methods,
    .tp_as_sequence = &index_sequence,
};

static PyTypeObject ActiveBlocksType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "rankway._core.ActiveBlocks",
    .tp_doc = "The counted blocks of requests in flight, per slot: rankway.index.ActiveBlocks.",
    .tp_basicsize = sizeof(Blocks),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = blocks_new,
    .tp_dealloc = (destructor)blocks_dealloc,
    .tp_methods = active_methods,
};

static PyMethodDef functions[] = {
    {"hash_chain", METHOD(core_hash_chain), FAST, "rankway.blocks.hash_chain."},
    {"choose", METHOD(core_choose), FAST, "rankway.choice.choose."},
    {"choose_for_tokens", METHOD(core_choose_for_tokens), FAST, "rankway.choice.choose_for_tokens."},
    {NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "rankway._core",
    .m_doc = "The compiled core; rankway.native picks it or the pure twins.",
    .m_size = -1,
    .m_methods = functions,
};

static bool make_names(void)
{
    for (int i = 0; i < COLUMNS; i++)
        if (!(column_name[i] = PyUnicode_InternFromString(COLUMN_NAMES[i])))
            return false;
    overlap_weight_name = PyUnicode_InternFromString("overlap_weight");
    temperature_name = PyUnicode_InternFromString("temperature");
    return overlap_weight_name && temperature_name;
}

PyMODINIT_FUNC PyInit__core(void)
{
    PyObject *m = NULL;
    uint64_t secret[2];
    if (!make_secret(secret))
        return NULL;
    marks_secret = secret[0];
    choose_instructions();
    if (make_names() && !PyType_Ready(&IndexType) && !PyType_Ready(&ActiveBlocksType))
        m = PyModule_Create(&module);
    if (m && (PyModule_AddObjectRef(m, "Index", (PyObject *)&IndexType) ||
              PyModule_AddObjectRef(m, "ActiveBlocks", (PyObject *)&ActiveBlocksType)))
        Py_CLEAR(m);
    return m;
}
