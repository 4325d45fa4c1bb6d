/* The path of a token through the router: from the bytes of a worker's AttachResponse to the bytes of server-sent events.
 *
 * The readable form and the oracle is the Python path (router/attach.py, request.py, openai_sinks.py): a message decoded by protobuf,
 * each delta handed to its receiver. Here a delta that only brings tokens and text for a receiver that is a Pipe takes a short cut:
 * its tokens and characters are counted, its text becomes an event, and what one message brings for a stream leaves in one write,
 * straight to the socket while the transport has nothing of its own to write. The first one takes the answer's head with it, and
 * whose books it concerns hears of it (`on_first`) once it is written; of the last one's reason (`on_end`) likewise.
 * Every other delta (errors, log probabilities, several choices, a stream that is one delta) goes to `on_delta` as ever.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <sys/socket.h>

/* ---- A stream that takes the short cut. */

#define SIZE_BYTES 18 /* room for a chunk's size and CR LF before the events … */
#define TAIL_BYTES 2  /* … and for CR LF after them */

typedef struct {
    PyObject_HEAD
    PyObject *write;     /* of the transport; called with bytes */
    PyObject *closing;   /* … whether it takes nothing any more */
    PyObject *unwritten; /* … and how many bytes it holds that the socket hasn't taken */
    int fd;              /* the transport's socket; -1: `write` is the only way */
    PyObject *generated; /* bytearray: output tokens, packed */
    PyObject *head;      /* bytes that go before all events, framed by nothing; NULL once they are written */
    PyObject *opening;   /* bytes: events before the first delta's */
    PyObject *before;    /* bytes of an event before its JSON string … */
    PyObject *after;     /* … and after it */
    Py_ssize_t chars;    /* code points of output text */
    Py_ssize_t grow_at;  /* size of `generated` from which on_grow is called */
    char chunked;        /* whether writes are framed as HTTP chunks */
    char closed;
    char begun;           /* the first delta has come, this way or the long one */
    char untold;          /* … this way, and on_first has still to be called */
    int64_t cached;       /* the first delta's cached_tokens, -1: it has none */
    uint8_t *buffer;      /* `front` bytes, the events that are built and not yet written, TAIL_BYTES */
    size_t front;         /* room for the head and a chunk's size */
    size_t size, room;    /* of the events alone */
} Pipe;

static PyTypeObject PipeType;
static PyObject *malformed; /* what a message that is none raises */
static PyObject *str_on_delta, *str_on_grow, *str_on_first, *str_on_end;

static bool reserve(Pipe *pipe, size_t more)
{
    if (pipe->buffer && pipe->room - pipe->size >= more)
        return true;
    size_t room = pipe->room ? pipe->room : 1024;
    while (room - pipe->size < more)
        room *= 2;
    uint8_t *buffer = PyMem_Realloc(pipe->buffer, pipe->front + room + TAIL_BYTES);
    if (!buffer) {
        PyErr_NoMemory();
        return false;
    }
    pipe->buffer = buffer;
    pipe->room = room;
    return true;
}

/* Bytes of the UTF-8 character at `text`, 0 if it is none. */
static int utf8_length(const uint8_t *text, size_t left)
{
    uint8_t lead = text[0];
    int length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (!length || (size_t)length > left)
        return 0;
    for (int i = 1; i < length; i++)
        if ((text[i] & 0xC0) != 0x80)
            return 0;
    if ((lead == 0xE0 && text[1] < 0xA0) || (lead == 0xED && text[1] > 0x9F) || (lead == 0xF0 && text[1] < 0x90) ||
        (lead == 0xF4 && text[1] > 0x8F))
        return 0; /* longer than needed, a surrogate, or beyond U+10FFFF */
    return length;
}

/* Writes `text` as a JSON string that no line splitter cuts (U+0085, U+2028 and U+2029 are escaped); counts its characters.
 * Returns its end, NULL if the text is no UTF-8. `to` has room for six bytes for each byte of text, and two quotes. */
static uint8_t *json_string(uint8_t *to, const uint8_t *text, size_t length, Py_ssize_t *chars)
{
    static const char hex[] = "0123456789abcdef";
    *to++ = '"';
    for (size_t i = 0; i < length; ++*chars) {
        uint8_t byte = text[i];
        if (byte >= 0x20 && byte < 0x80 && byte != '"' && byte != '\\') {
            *to++ = byte;
            i++;
            continue;
        }
        if (byte < 0x80) {
            const char *at = byte ? strchr("\"\"\\\\\nn\rr\tt\bb\ff", byte) : NULL;
            *to++ = '\\';
            if (at) {
                *to++ = (uint8_t)at[1];
            } else {
                memcpy(to, "u00", 3);
                to[3] = (uint8_t)hex[byte >> 4];
                to[4] = (uint8_t)hex[byte & 15];
                to += 5;
            }
            i++;
            continue;
        }
        int size = utf8_length(text + i, length - i);
        if (!size)
            return NULL;
        if (size == 2 && byte == 0xC2 && text[i + 1] == 0x85) {
            memcpy(to, "\\u0085", 6);
            to += 6;
        } else if (size == 3 && byte == 0xE2 && text[i + 1] == 0x80 && (text[i + 2] & 0xFE) == 0xA8) {
            memcpy(to, text[i + 2] == 0xA8 ? "\\u2028" : "\\u2029", 6);
            to += 6;
        } else {
            memcpy(to, text + i, (size_t)size);
            to += size;
        }
        i += (size_t)size;
    }
    *to++ = '"';
    return to;
}

/* Adds the event of a text; 1: done, 0: no UTF-8 and nothing added, -1: exception set. */
static int add_event(Pipe *pipe, const uint8_t *text, size_t length)
{
    size_t before = (size_t)PyBytes_GET_SIZE(pipe->before), after = (size_t)PyBytes_GET_SIZE(pipe->after);
    if (!reserve(pipe, before + after + 2 + 6 * length))
        return -1;
    uint8_t *to = pipe->buffer + pipe->front + pipe->size;
    memcpy(to, PyBytes_AS_STRING(pipe->before), before);
    Py_ssize_t chars = 0;
    to = json_string(to + before, text, length, &chars);
    if (!to)
        return 0;
    memcpy(to, PyBytes_AS_STRING(pipe->after), after);
    pipe->size = (size_t)(to + after - pipe->buffer) - pipe->front;
    pipe->chars += chars;
    return 1;
}

/* Adds the events that come before the first delta's. */
static bool add_opening(Pipe *pipe)
{
    size_t size = (size_t)PyBytes_GET_SIZE(pipe->opening);
    if (!reserve(pipe, size))
        return false;
    memcpy(pipe->buffer + pipe->front + pipe->size, PyBytes_AS_STRING(pipe->opening), size);
    pipe->size += size;
    return true;
}

/* Frames the events as an HTTP chunk: its size in hex before them, CR LF after them. Returns the chunk's begin. */
static uint8_t *frame_chunk(Pipe *pipe, size_t size)
{
    static const char hex[] = "0123456789abcdef";
    uint8_t *events = pipe->buffer + pipe->front, *begin = events - 2;
    memcpy(events + size, "\r\n", 2);
    memcpy(begin, "\r\n", 2);
    for (size_t left = size; left; left >>= 4)
        *--begin = (uint8_t)hex[left & 15];
    return begin;
}

/* Gives the socket what it takes at once; returns how much that was. 0 too where the transport has to be asked: it holds bytes
 * that go first, it is closing (its descriptor may soon be another's), or the socket failed. -1: exception set. */
static Py_ssize_t send_now(Pipe *pipe, const uint8_t *data, size_t size)
{
    if (pipe->fd < 0)
        return 0;
    PyObject *closing = PyObject_CallNoArgs(pipe->closing), *unwritten = closing ? PyObject_CallNoArgs(pipe->unwritten) : NULL;
    bool free = closing == Py_False && unwritten && PyLong_AsSsize_t(unwritten) == 0;
    Py_XDECREF(closing);
    Py_XDECREF(unwritten);
    if (PyErr_Occurred())
        return -1;
    ssize_t sent = free ? send(pipe->fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
    return sent > 0 ? sent : 0;
}

/* Writes what has been built, after the head if that is still to come. */
static int flush(Pipe *pipe)
{
    size_t size = pipe->size;
    pipe->size = 0;
    bool with_head = pipe->head && pipe->untold; /* not if the long way has written it */
    if ((!size && !with_head) || pipe->closed)
        return 0;
    bool framed = pipe->chunked && size;
    uint8_t *begin = framed ? frame_chunk(pipe, size) : pipe->buffer + pipe->front;
    const uint8_t *end = pipe->buffer + pipe->front + size + (framed ? TAIL_BYTES : 0);
    if (with_head) {
        begin -= PyBytes_GET_SIZE(pipe->head);
        memcpy(begin, PyBytes_AS_STRING(pipe->head), (size_t)PyBytes_GET_SIZE(pipe->head));
        Py_CLEAR(pipe->head);
    }
    size_t whole = (size_t)(end - begin);
    Py_ssize_t sent = send_now(pipe, begin, whole);
    if (sent < 0 || (size_t)sent == whole)
        return sent < 0 ? -1 : 0;
    PyObject *data = PyBytes_FromStringAndSize((const char *)begin + sent, (Py_ssize_t)whole - sent);
    PyObject *result = data ? PyObject_CallOneArg(pipe->write, data) : NULL;
    Py_XDECREF(data);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* ---- The wire format of protobuf. */

typedef struct {
    const uint8_t *at, *end;
} Span;

static bool varint(Span *span, uint64_t *value)
{
    *value = 0;
    for (int shift = 0; shift < 64 && span->at < span->end; shift += 7) {
        uint8_t byte = *span->at++;
        *value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80)
            return true;
    }
    return false;
}

/* The next field: its number, and its value or its bytes; of a fixed-size one, which none of our messages has, number 0.
 * False at the end or (with `bad`) if it is malformed. */
static bool next_field(Span *span, uint32_t *number, uint64_t *value, Span *bytes, bool *bad)
{
    uint64_t tag;
    if (span->at == span->end)
        return false;
    *bad = true;
    if (!varint(span, &tag) || tag >> 3 == 0 || tag >> 32)
        return false;
    *number = (uint32_t)(tag >> 3);
    size_t fixed = 0;
    bytes->at = bytes->end = NULL;
    switch (tag & 7) {
    case 0:
        if (!varint(span, value))
            return false;
        break;
    case 2:
        if (!varint(span, value) || *value > (uint64_t)(span->end - span->at))
            return false;
        bytes->at = span->at;
        span->at = bytes->end = span->at + *value;
        break;
    case 1:
    case 5:
        fixed = (tag & 7) == 1 ? 8 : 4;
        if ((size_t)(span->end - span->at) < fixed)
            return false;
        span->at += fixed;
        *number = 0;
        break;
    default:
        return false;
    }
    *bad = false;
    return true;
}

typedef struct {
    uint64_t stream;
    Span tokens, text;
    int64_t cached;  /* -1: not said */
    int32_t reason;  /* 0: it isn't the last */
    bool plain;      /* nothing else, of choice 0, and whole tokens */
} Delta;

static bool parse_delta(Span span, Delta *delta)
{
    static const Span none = {NULL, NULL};
    uint32_t number;
    uint64_t value;
    Span bytes;
    bool bad = false;
    *delta = (Delta){0, none, none, -1, 0, true};
    while (next_field(&span, &number, &value, &bytes, &bad)) {
        if (number == 1 && !bytes.at)
            delta->stream = value;
        else if (number == 3 && bytes.at)
            delta->tokens = bytes;
        else if (number == 4 && bytes.at)
            delta->text = bytes;
        else if (number == 6 && !bytes.at)
            delta->reason = (int32_t)value;
        else if (number == 7 && !bytes.at)
            delta->cached = (uint32_t)value;
        else if (number != 2 || bytes.at || value)
            delta->plain = false; /* index 0 says nothing */
    }
    if ((delta->tokens.end - delta->tokens.at) % 4)
        delta->plain = false;
    return !bad;
}

/* ---- Dispatch. */

/* 1: the pipe has taken the delta; 0: it can't, and nothing has happened; -1: exception set. */
static int take(Pipe *pipe, const Delta *delta)
{
    Py_ssize_t had = PyByteArray_GET_SIZE(pipe->generated), more = delta->tokens.end - delta->tokens.at;
    size_t length = (size_t)(delta->text.end - delta->text.at);
    size_t built = pipe->size;
    if (more && PyByteArray_Resize(pipe->generated, had + more) < 0)
        return -1;
    int added = pipe->begun || add_opening(pipe) ? 1 : -1;
    if (added > 0 && length)
        added = add_event(pipe, delta->text.at, length);
    if (added <= 0) {
        pipe->size = built; /* the opening comes the long way, too */
        if (more && PyByteArray_Resize(pipe->generated, had) < 0)
            return -1;
        return added;
    }
    if (more)
        memcpy(PyByteArray_AS_STRING(pipe->generated) + had, delta->tokens.at, (size_t)more);
    if (!pipe->begun) {
        pipe->begun = pipe->untold = 1;
        pipe->cached = delta->cached;
    }
    if (had + more >= pipe->grow_at && !delta->reason) {
        PyObject *result = PyObject_CallMethodNoArgs((PyObject *)pipe, str_on_grow);
        if (!result)
            PyErr_WriteUnraisable((PyObject *)pipe); /* what the client gets has been built: the stream goes on */
        Py_XDECREF(result);
    }
    return 1;
}

/* Calls a method with a number. */
static int tell(Pipe *pipe, PyObject *name, int64_t number)
{
    PyObject *value = PyLong_FromLongLong(number);
    PyObject *result = value ? PyObject_CallMethodOneArg((PyObject *)pipe, name, value) : NULL;
    Py_XDECREF(value);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Writes what has been built, and then says that the first delta has come if that is news. */
static int settle(Pipe *pipe)
{
    if (flush(pipe) < 0)
        return -1;
    if (!pipe->untold || pipe->closed)
        return 0;
    pipe->untold = 0;
    return tell(pipe, str_on_first, pipe->cached);
}

static int dispatch_delta(Span span, PyObject *receivers, PyObject *decode, PyObject *touched)
{
    Delta delta;
    if (!parse_delta(span, &delta)) {
        PyErr_SetString(malformed, "a delta is malformed");
        return -1;
    }
    PyObject *key = PyLong_FromUnsignedLongLong(delta.stream);
    PyObject *receiver = key ? PyDict_GetItemWithError(receivers, key) : NULL;
    Py_XDECREF(key);
    if (!receiver)
        return PyErr_Occurred() ? -1 : 0; /* a stream that was aborted */
    Py_INCREF(receiver);
    int done = 0;
    if (PyObject_TypeCheck(receiver, &PipeType)) {
        Pipe *pipe = (Pipe *)receiver;
        bool was_settled = !pipe->size && !pipe->untold, is_all = delta.reason && !pipe->begun;
        done = pipe->closed || !pipe->generated || !delta.plain || is_all ? 0 : take(pipe, &delta);
        if (done > 0 && was_settled && (pipe->size || pipe->untold) && PyList_Append(touched, receiver) < 0)
            done = -1;
        if ((!done || (done > 0 && delta.reason)) && settle(pipe) < 0)
            done = -1;
        if (done > 0 && delta.reason && tell(pipe, str_on_end, delta.reason) < 0)
            done = -1;
    }
    if (!done) {
        PyObject *bytes = PyBytes_FromStringAndSize((const char *)span.at, span.end - span.at);
        PyObject *message = bytes ? PyObject_CallOneArg(decode, bytes) : NULL;
        PyObject *result = message ? PyObject_CallMethodOneArg(receiver, str_on_delta, message) : NULL;
        done = result ? 1 : -1;
        Py_XDECREF(result);
        Py_XDECREF(message);
        Py_XDECREF(bytes);
    }
    Py_DECREF(receiver);
    return done < 0 ? -1 : 0;
}

static int dispatch_all(Span message, PyObject *receivers, PyObject *decode, PyObject *touched)
{
    uint32_t number;
    uint64_t value;
    Span step, delta;
    bool bad = false;
    while (!bad && next_field(&message, &number, &value, &step, &bad))
        if (number == 2 && step.at)
            while (next_field(&step, &number, &value, &delta, &bad))
                if (number == 1 && delta.at && dispatch_delta(delta, receivers, decode, touched) < 0)
                    return -1;
    if (bad)
        PyErr_SetString(malformed, "no AttachResponse");
    return bad ? -1 : 0;
}

/* Dispatches messages one after another and then writes what came of them. */
static PyObject *dispatch_and_flush(const Span *messages, size_t count, PyObject *receivers, PyObject *decode)
{
    PyObject *touched = PyList_New(0);
    if (!touched)
        return NULL;
    int result = 0;
    for (size_t i = 0; i < count && !result; i++)
        result = dispatch_all(messages[i], receivers, decode, touched);
    PyObject *type = NULL, *error = NULL, *trace = NULL;
    PyErr_Fetch(&type, &error, &trace);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(touched); i++)
        if (flush((Pipe *)PyList_GET_ITEM(touched, i)) < 0)
            PyErr_WriteUnraisable(PyList_GET_ITEM(touched, i)); /* the other streams go on */
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(touched); i++) /* all clients first: the books can wait */
        if (settle((Pipe *)PyList_GET_ITEM(touched, i)) < 0)
            PyErr_WriteUnraisable(PyList_GET_ITEM(touched, i));
    PyErr_Restore(type, error, trace);
    Py_DECREF(touched);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static bool take_arguments(PyObject *const *args, Py_ssize_t nargs, Span *data)
{
    if (nargs != 3 || !PyDict_Check(args[0]) || !PyBytes_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "(receivers: dict, decode: callable, data: bytes) are wanted");
        return false;
    }
    data->at = (const uint8_t *)PyBytes_AS_STRING(args[2]);
    data->end = data->at + PyBytes_GET_SIZE(args[2]);
    return true;
}

static PyObject *dispatch(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    Span message;
    return take_arguments(args, nargs, &message) ? dispatch_and_flush(&message, 1, args[0], args[1]) : NULL;
}

/* ---- Frames: what a socket mostly gives is one whole HTTP/2 DATA frame with one whole gRPC message. */

#define FRAME_HEADER 9
#define MESSAGE_HEADER 5
#define MOST_FRAMES 16

static uint32_t big_endian(const uint8_t *at, int bytes)
{
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++)
        value = value << 8 | at[i];
    return value;
}

/* The messages in `data` if it consists of plain DATA frames of stream 1 with one whole message each; 0: it doesn't. */
static size_t whole_messages(Span data, Span *messages)
{
    static const uint8_t plain[6] = {0, 0, 0, 0, 0, 1}; /* kind, flags, stream */
    size_t count = 0;
    for (; data.at < data.end; count++) {
        if (count == MOST_FRAMES || data.end - data.at < FRAME_HEADER + MESSAGE_HEADER || memcmp(data.at + 3, plain, 6))
            return 0;
        uint32_t size = big_endian(data.at, 3);
        const uint8_t *message = data.at + FRAME_HEADER;
        if (size > data.end - message || size < MESSAGE_HEADER || message[0] || big_endian(message + 1, 4) != size - MESSAGE_HEADER)
            return 0;
        data.at = message + size;
        messages[count] = (Span){message + MESSAGE_HEADER, data.at};
    }
    return count;
}

static PyObject *dispatch_frames(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    Span data, messages[MOST_FRAMES];
    if (!take_arguments(args, nargs, &data))
        return NULL;
    size_t count = whole_messages(data, messages);
    if (!count)
        return PyLong_FromLong(0);
    PyObject *done = dispatch_and_flush(messages, count, args[0], args[1]);
    if (!done)
        return NULL;
    Py_DECREF(done);
    return PyLong_FromSsize_t(data.end - data.at - (Py_ssize_t)count * FRAME_HEADER);
}

/* ---- The type and the module. */

static int pipe_init(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"socket", "chunked", "head", "opening", "before", "after", "generated", "grow_at", NULL};
    Pipe *pipe = (Pipe *)object;
    PyObject *write, *closing, *unwritten, *head, *opening, *before, *after, *generated;
    int chunked;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "(OOOi)pSSSSYn", names, &write, &closing, &unwritten, &pipe->fd, &chunked, &head,
                                     &opening, &before, &after, &generated, &pipe->grow_at))
        return -1;
    if (pipe->buffer) {
        PyErr_SetString(PyExc_TypeError, "a pipe that is in use can't be made again");
        return -1;
    }
    Py_XSETREF(pipe->write, Py_NewRef(write));
    Py_XSETREF(pipe->closing, Py_NewRef(closing));
    Py_XSETREF(pipe->unwritten, Py_NewRef(unwritten));
    Py_XSETREF(pipe->generated, Py_NewRef(generated));
    Py_XSETREF(pipe->head, Py_NewRef(head));
    Py_XSETREF(pipe->opening, Py_NewRef(opening));
    Py_XSETREF(pipe->before, Py_NewRef(before));
    Py_XSETREF(pipe->after, Py_NewRef(after));
    pipe->front = (size_t)PyBytes_GET_SIZE(head) + SIZE_BYTES;
    pipe->chunked = (char)chunked;
    return 0;
}

static int pipe_traverse(PyObject *object, visitproc visit, void *arg)
{
    Pipe *pipe = (Pipe *)object;
    Py_VISIT(pipe->write);
    Py_VISIT(pipe->closing);
    Py_VISIT(pipe->unwritten);
    Py_VISIT(pipe->generated);
    return 0;
}

static int pipe_clear(PyObject *object)
{
    Pipe *pipe = (Pipe *)object;
    pipe->closed = 1; /* without its parts it takes nothing */
    Py_CLEAR(pipe->write);
    Py_CLEAR(pipe->closing);
    Py_CLEAR(pipe->unwritten);
    Py_CLEAR(pipe->generated);
    return 0;
}

static void pipe_dealloc(PyObject *object)
{
    Pipe *pipe = (Pipe *)object;
    PyObject_GC_UnTrack(object);
    pipe_clear(object);
    Py_XDECREF(pipe->head);
    Py_XDECREF(pipe->opening);
    Py_XDECREF(pipe->before);
    Py_XDECREF(pipe->after);
    PyMem_Free(pipe->buffer);
    Py_TYPE(object)->tp_free(object);
}

static PyMemberDef pipe_members[] = {
    {"chars", T_PYSSIZET, offsetof(Pipe, chars), 0, "Code points of output text."},
    {"grow_at", T_PYSSIZET, offsetof(Pipe, grow_at), 0, "Bytes of `generated` from which on_grow is called."},
    {"closed", T_BOOL, offsetof(Pipe, closed), 0, "Nothing is written any more."},
    {"begun", T_BOOL, offsetof(Pipe, begun), 0, "The first delta has come, this way or the long one."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject PipeType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankway._steps.Pipe",
    .tp_doc = "A stream whose plain deltas become server-sent events without Python objects in between.",
    .tp_basicsize = sizeof(Pipe),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = pipe_init,
    .tp_dealloc = pipe_dealloc,
    .tp_traverse = pipe_traverse,
    .tp_clear = pipe_clear,
    .tp_members = pipe_members,
};

static PyMethodDef functions[] = {
    {"dispatch", (PyCFunction)(void (*)(void))dispatch, METH_FASTCALL, "Hand the deltas of an AttachResponse to their receivers."},
    {"dispatch_frames", (PyCFunction)(void (*)(void))dispatch_frames, METH_FASTCALL,
     "The same for each of some plain DATA frames; returns their bytes without headers, 0 if there is anything else and nothing was done."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "rankway._steps", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__steps(void)
{
    str_on_delta = PyUnicode_InternFromString("on_delta");
    str_on_grow = PyUnicode_InternFromString("on_grow");
    str_on_first = PyUnicode_InternFromString("on_first");
    str_on_end = PyUnicode_InternFromString("on_end");
    if (!str_on_delta || !str_on_grow || !str_on_first || !str_on_end || PyType_Ready(&PipeType) < 0)
        return NULL;
    malformed = PyErr_NewExceptionWithDoc("rankway._steps.Malformed", "A message is no AttachResponse.", NULL, NULL);
    PyObject *made = malformed ? PyModule_Create(&module) : NULL;
    if (made && (PyModule_AddObjectRef(made, "Pipe", (PyObject *)&PipeType) < 0 ||
                 PyModule_AddObjectRef(made, "Malformed", malformed) < 0))
        Py_CLEAR(made);
    return made;
}
