// SPDX-License-Identifier: Apache-2.0
/* Lets the N-th call that changes files below a directory fail, or kills the process in the middle of it.

   Loaded with LD_PRELOAD; failing_calls.py compiles it and calls failing_calls_use, _arm and _disarm. The state is a file
   that a process and the programs it starts have in memory, so that the calls of all of them are counted together. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* Kinds of calls: those that need room, those that change names, those that only wait for the device. */
enum { FILLS = 1, NAMES = 2, SYNCS = 4 };
/* What happens: the call kills; it fails, and no other; the disk is full from then on; it is read-only from then on. */
enum { NOTHING = 0, KILL = 1, ONCE = 2, FULL = 3, READ_ONLY = 4 };

static struct state {
    atomic_long calls;
    atomic_int what;
    int error;
    long target;
    char prefix[PATH_MAX];
} *state;

int failing_calls_use(const char *path) {
    int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR);
    if (file < 0) return -1;
    void *memory = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    state = memory == MAP_FAILED ? NULL : memory;
    return state ? 0 : -1;
}

__attribute__((constructor)) static void use_given_state(void) {
    const char *path = getenv("FAILING_CALLS_STATE");
    if (path) failing_calls_use(path);
}

long failing_calls_size(void) { return sizeof(struct state); }

void failing_calls_arm(const char *prefix, int what, int error, long target) {
    atomic_store(&state->what, NOTHING);
    strncpy(state->prefix, prefix, PATH_MAX - 1);
    state->target = target;
    state->error = error;
    atomic_store(&state->calls, 0);
    atomic_store(&state->what, what);
}

long failing_calls_disarm(void) {
    atomic_store(&state->what, NOTHING);
    return atomic_load(&state->calls);
}

static int is_armed(void) { return state && atomic_load(&state->what) != NOTHING; }

static int is_below(const char *path) {
    size_t length = strlen(state->prefix);
    return !strncmp(path, state->prefix, length) && (path[length] == '/' || !path[length]);
}

static int is_file_below(int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static int is_name_below(int directory, const char *path) {
    if (path[0] == '/') return is_below(path);
    if (directory != AT_FDCWD) return is_file_below(directory);
    char here[PATH_MAX];
    return getcwd(here, sizeof here) && is_below(here);
}

/* What a counted call is to do: 0 goes on, an error number fails, HALF writes half (and dies where that is asked for). */
enum { HALF = -1 };

static int judge(int kind, size_t bytes) {
    int what = atomic_load(&state->what);
    long number = atomic_fetch_add(&state->calls, 1) + 1;
    if (number < state->target) return 0;
    int is_first = number == state->target;
    if (what == KILL && is_first) {
        if (bytes > 1) return HALF;
        kill(getpid(), SIGKILL);
    }
    if (what == ONCE) return is_first ? state->error : 0;
    if (what == FULL) return is_first && bytes > 1 ? HALF : is_first || kind == FILLS ? state->error : 0;
    if (what == READ_ONLY) return kind == SYNCS ? 0 : state->error;
    return 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL_WHERE_ASKED(is_counted, kind)                    \
    if (is_armed() && (is_counted)) {                         \
        int error = judge(kind, 0);                           \
        if (error) { errno = error; return -1; }              \
    }

static int opens_for_change(int flags) { return flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR); }

#define OPENING(name)                                                                            \
    int name(const char *path, int flags, ...) {                                                 \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest);         \
        FAIL_WHERE_ASKED(opens_for_change(flags) && is_name_below(AT_FDCWD, path), FILLS)        \
        return REAL(name)(path, flags, mode);                                                    \
    }
OPENING(open)
OPENING(open64)

#define OPENING_AT(name)                                                                         \
    int name(int directory, const char *path, int flags, ...) {                                  \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest);         \
        FAIL_WHERE_ASKED(opens_for_change(flags) && is_name_below(directory, path), FILLS)       \
        return REAL(name)(directory, path, flags, mode);                                         \
    }
OPENING_AT(openat)
OPENING_AT(openat64)

#define WRITING(name, parameters, arguments, half, bytes)                \
    ssize_t name parameters {                                            \
        if (is_armed() && is_file_below(file)) {                         \
            int error = judge(FILLS, bytes);                             \
            if (error == HALF) {                                         \
                ssize_t written = REAL(name) half;                       \
                if (atomic_load(&state->what) == KILL) kill(getpid(), SIGKILL); \
                return written;                                          \
            }                                                            \
            if (error) { errno = error; return -1; }                     \
        }                                                                \
        return REAL(name) arguments;                                     \
    }
WRITING(write, (int file, const void *data, size_t size), (file, data, size), (file, data, size / 2), size)
WRITING(pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at), (file, data, size / 2, at), size)
WRITING(pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at), (file, data, size / 2, at), size)
WRITING(writev, (int file, const struct iovec *parts, int count), (file, parts, count), (file, parts, count / 2), count)
WRITING(pwritev, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at), (file, parts, count / 2, at), count)
WRITING(pwritev64, (int file, const struct iovec *parts, int count, off64_t at), (file, parts, count, at), (file, parts, count / 2, at), count)
WRITING(sendfile, (int file, int from, off_t *at, size_t size), (file, from, at, size), (file, from, at, size / 2), size)
WRITING(sendfile64, (int file, int from, off64_t *at, size_t size), (file, from, at, size), (file, from, at, size / 2), size)
WRITING(copy_file_range, (int from, off64_t *start, int file, off64_t *at, size_t size, unsigned flags),
        (from, start, file, at, size, flags), (from, start, file, at, size / 2, flags), size)

int ftruncate(int file, off_t size) { FAIL_WHERE_ASKED(is_file_below(file), FILLS) return REAL(ftruncate)(file, size); }
int ftruncate64(int file, off64_t size) { FAIL_WHERE_ASKED(is_file_below(file), FILLS) return REAL(ftruncate64)(file, size); }
int fallocate(int file, int mode, off_t at, off_t size) { FAIL_WHERE_ASKED(is_file_below(file), FILLS) return REAL(fallocate)(file, mode, at, size); }
int fallocate64(int file, int mode, off64_t at, off64_t size) { FAIL_WHERE_ASKED(is_file_below(file), FILLS) return REAL(fallocate64)(file, mode, at, size); }

/* These two return the error. */
#define ALLOCATING(name, offset)                                                  \
    int name(int file, offset at, offset size) {                                  \
        if (is_armed() && is_file_below(file)) {                                  \
            int error = judge(FILLS, 0);                                          \
            if (error) return error;                                              \
        }                                                                         \
        return REAL(name)(file, at, size);                                        \
    }
ALLOCATING(posix_fallocate, off_t)
ALLOCATING(posix_fallocate64, off64_t)

int fsync(int file) { FAIL_WHERE_ASKED(is_file_below(file), SYNCS) return REAL(fsync)(file); }
int fdatasync(int file) { FAIL_WHERE_ASKED(is_file_below(file), SYNCS) return REAL(fdatasync)(file); }
int sync_file_range(int file, off64_t at, off64_t size, unsigned flags) { FAIL_WHERE_ASKED(is_file_below(file), SYNCS) return REAL(sync_file_range)(file, at, size, flags); }
int syncfs(int file) { FAIL_WHERE_ASKED(is_file_below(file), SYNCS) return REAL(syncfs)(file); }

int close(int file) {
    int flags = is_armed() ? fcntl(file, F_GETFL) : -1;
    int error = flags >= 0 && opens_for_change(flags) && is_file_below(file) ? judge(SYNCS, 0) : 0;
    int result = REAL(close)(file); /* a file is closed also where that reports an error */
    if (error) { errno = error; return -1; }
    return result;
}

int rename(const char *from, const char *to) { FAIL_WHERE_ASKED(is_name_below(AT_FDCWD, to), NAMES) return REAL(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) { FAIL_WHERE_ASKED(is_name_below(b, to), NAMES) return REAL(renameat)(a, from, b, to); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { FAIL_WHERE_ASKED(is_name_below(b, to), NAMES) return REAL(renameat2)(a, from, b, to, flags); }
int link(const char *from, const char *to) { FAIL_WHERE_ASKED(is_name_below(AT_FDCWD, to), FILLS) return REAL(link)(from, to); }
int symlink(const char *content, const char *path) { FAIL_WHERE_ASKED(is_name_below(AT_FDCWD, path), FILLS) return REAL(symlink)(content, path); }
int unlink(const char *path) { FAIL_WHERE_ASKED(is_name_below(AT_FDCWD, path), NAMES) return REAL(unlink)(path); }
int unlinkat(int directory, const char *path, int flags) { FAIL_WHERE_ASKED(is_name_below(directory, path), NAMES) return REAL(unlinkat)(directory, path, flags); }
int rmdir(const char *path) { FAIL_WHERE_ASKED(is_name_below(AT_FDCWD, path), NAMES) return REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) { FAIL_WHERE_ASKED(is_name_below(AT_FDCWD, path), FILLS) return REAL(mkdir)(path, mode); }
int mkdirat(int directory, const char *path, mode_t mode) { FAIL_WHERE_ASKED(is_name_below(directory, path), FILLS) return REAL(mkdirat)(directory, path, mode); }
