/* A file system that lies: a library that programs load before the C library (lying_disk.py).
 *
 * Calls on files below $LYING_UNDER do what $LYING_KIND says, drawn by $LYING_SEED:
 *
 *   short    a write takes a part of its bytes
 *   stripe   writes that reach one of four stripes of a file fail with ENOSPC
 *   fsync    one flush fails with EIO, drops the last page, and the next one succeeds
 *   quota    EDQUOT, from a write or, as NFS does, from the flush or close after it
 *   slow     a close takes $LYING_S seconds
 *   stale    a stat of what another node wrote in the last $LYING_S seconds has an old size and time
 *   late     what another node made or renamed in that time is not there yet
 *   listing  it is there, but no listing has it
 *   flock    locks are granted to everybody; each node has a boot id and host name of its own
 *
 * The kinds short to slow hold for files whose path contains $LYING_MATCH. $LYING_NODE names the
 * node of a process; a table in $LYING_TABLE, mapped by all, says which node changed which inode.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define ROWS 4096
#define STRIPE 16384

struct row { ino_t inode; unsigned node; double named_s, written_s; };
static struct table { unsigned rows, flushes; struct row row[ROWS]; } *table;
static const char *kind, *under, *match, *node_name;
static unsigned seed, node;
static double for_s;

static void begin(void) {
    if (kind) return;
    const char *text;
    under = (text = getenv("LYING_UNDER")) ? text : "/nowhere";
    match = (text = getenv("LYING_MATCH")) ? text : "";
    node_name = (text = getenv("LYING_NODE")) ? text : "n0";
    seed = (text = getenv("LYING_SEED")) ? (unsigned)atoi(text) : 0;
    for_s = (text = getenv("LYING_S")) ? atof(text) : 0;
    for (text = node_name; *text; text++) node = node * 31 + (unsigned char)*text;
    int fd = (int)openat(AT_FDCWD, getenv("LYING_TABLE"), O_RDWR | O_CLOEXEC);
    table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (table == MAP_FAILED) abort();
    close(fd);
    kind = (text = getenv("LYING_KIND")) ? text : "";
}

static int is(const char *name) { begin(); return strcmp(kind, name) == 0; }

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static unsigned draw(void) {
    static unsigned number;
    unsigned x = (seed + 1) * 2654435761u + ++number * 40503u + (unsigned)getpid() * 97u;
    x ^= x >> 15; x *= 2246822519u; x ^= x >> 13;
    return x;
}

/* The path of `name` in the folder `at`, or of the open file `at`; false if it is none of ours. */
static int ours(int at, const char *name, char *path) {
    begin();
    char link[64];
    size_t length = 0;
    if (!name || name[0] != '/') {
        if (at == AT_FDCWD) { if (!getcwd(path, PATH_MAX)) return 0; length = strlen(path); }
        else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            ssize_t n = readlink(link, path, PATH_MAX - 1);
            if (n < 0) return 0;
            length = (size_t)n;
            path[length] = 0;
        }
        if (name) path[length++] = '/';
    }
    if (name) snprintf(path + length, PATH_MAX - length, "%s", name);
    size_t n = strlen(under);
    return strncmp(path, under, n) == 0 && (path[n] == '/' || !path[n]);
}

static int writes_lie(int fd, const char *name) {
    char path[PATH_MAX];
    return is(name) && ours(fd, NULL, path) && strstr(path, match) != NULL;
}

static struct row *row_of(ino_t inode) {
    for (unsigned i = 0; i < table->rows && i < ROWS; i++)
        if (table->row[i].inode == inode) return &table->row[i];
    return NULL;
}

static void note(ino_t inode, int named) {
    struct row *row = row_of(inode);
    if (!row) {
        unsigned i = __sync_fetch_and_add(&table->rows, 1);
        if (i >= ROWS) abort();
        row = &table->row[i];
        row->inode = inode;
    }
    row->node = node;
    if (named) row->named_s = now_s(); else row->written_s = now_s();
}

static int is_new(ino_t inode, int named) {
    struct row *row = row_of(inode);
    return row && row->node != node
        && now_s() - (named ? row->named_s : row->written_s) < for_s;
}

static int inode_of(const char *path, ino_t *inode) {
    REAL(lstat64);
    struct stat64 info;
    int before = errno, code = real(path, &info);
    errno = before;
    *inode = info.st_ino;
    return code == 0;
}

static void note_path(int at, const char *name) {
    char path[PATH_MAX];
    ino_t inode;
    if (ours(at, name, path) && inode_of(path, &inode)) note(inode, 1);
}

/* True, with ENOENT, if a name on the way to a file is not there yet for this node. */
static int hidden(int at, const char *name) {
    char path[PATH_MAX];
    ino_t inode;
    if (!is("late") || !name || !ours(at, name, path)) return 0;
    for (char *end = path + strlen(under); end; end = strchr(end + 1, '/')) {
        char kept = *end;
        *end = 0;
        int is_late = inode_of(path, &inode) && is_new(inode, 1);
        *end = kept;
        if (is_late) { errno = ENOENT; return 1; }
        if (!kept) return 0;
    }
    if (inode_of(path, &inode) && is_new(inode, 1)) { errno = ENOENT; return 1; }
    return 0;
}

/* -- names -- */

static int opened(int fd, int at, const char *name, int flags, int was_there) {
    char path[PATH_MAX];
    struct stat64 info;
    if (fd < 0 || !ours(at, name, path)) return fd;
    if ((flags & (O_CREAT | O_TRUNC)) && fstat64(fd, &info) == 0) {
        if (!was_there) note(info.st_ino, 1);
        if (flags & O_TRUNC) note(info.st_ino, 0);
    }
    return fd;
}

static int was_there(int at, const char *name) {
    char path[PATH_MAX];
    ino_t inode;
    return ours(at, name, path) && inode_of(path, &inode);
}

static const char *own_boot(const char *name, char *path) {
    if (!is("flock") || strcmp(name, "/proc/sys/kernel/random/boot_id")) return name;
    snprintf(path, PATH_MAX, "%s.%s", getenv("LYING_TABLE"), node_name);
    return path;
}

#define OPEN(function, TAKES, PASSES, at) \
    int function TAKES { \
        REAL(function); \
        mode_t mode = 0; \
        char boot[PATH_MAX]; \
        if (flags & (O_CREAT | __O_TMPFILE)) { \
            va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); \
        } \
        if (!kind && getenv("LYING_TABLE") && !strcmp(name, getenv("LYING_TABLE"))) \
            return real PASSES; \
        if (hidden(at, name)) return -1; \
        int before = was_there(at, name); \
        name = own_boot(name, boot); \
        return opened(real PASSES, at, name, flags, before); \
    }
OPEN(open, (const char *name, int flags, ...), (name, flags, mode), AT_FDCWD)
OPEN(open64, (const char *name, int flags, ...), (name, flags, mode), AT_FDCWD)
OPEN(openat, (int at, const char *name, int flags, ...), (at, name, flags, mode), at)
OPEN(openat64, (int at, const char *name, int flags, ...), (at, name, flags, mode), at)

FILE *fopen64(const char *name, const char *mode) {
    REAL(fopen64);
    return hidden(AT_FDCWD, name) ? NULL : real(name, mode);
}

DIR *opendir(const char *name) {
    REAL(opendir);
    return hidden(AT_FDCWD, name) ? NULL : real(name);
}

struct dirent64 *readdir64(DIR *folder) {
    REAL(readdir64);
    char path[PATH_MAX];
    struct dirent64 *entry;
    do entry = real(folder);
    while (entry && (is("listing") || is("late")) && entry->d_name[0] != '.'
           && ours(dirfd(folder), NULL, path) && is_new(entry->d_ino, 1));
    return entry;
}

int mkdir(const char *name, mode_t mode) {
    REAL(mkdir);
    int code = real(name, mode);
    if (code == 0) note_path(AT_FDCWD, name);
    return code;
}

int rename(const char *from, const char *to) {
    REAL(rename);
    if (hidden(AT_FDCWD, from)) return -1;
    int code = real(from, to);
    if (code == 0) note_path(AT_FDCWD, to);
    return code;
}

int link(const char *from, const char *to) {
    REAL(link);
    int code = real(from, to);
    if (code == 0) note_path(AT_FDCWD, to);
    return code;
}

int access(const char *name, int mode) {
    REAL(access);
    return hidden(AT_FDCWD, name) ? -1 : real(name, mode);
}

static int seen(int code, int at, const char *name, struct stat64 *info) {
    char path[PATH_MAX];
    if (code == 0 && is("stale") && S_ISREG(info->st_mode) && name[0]
        && ours(at, name, path) && is_new(info->st_ino, 0)) {
        info->st_size /= 2;
        info->st_mtim.tv_sec -= 100;
    }
    return code;
}

int stat64(const char *name, struct stat64 *info) {
    REAL(stat64);
    return hidden(AT_FDCWD, name) ? -1 : seen(real(name, info), AT_FDCWD, name, info);
}

int lstat64(const char *name, struct stat64 *info) {
    REAL(lstat64);
    return hidden(AT_FDCWD, name) ? -1 : seen(real(name, info), AT_FDCWD, name, info);
}

int fstatat64(int at, const char *name, struct stat64 *info, int flags) {
    REAL(fstatat64);
    return hidden(at, name) ? -1 : seen(real(at, name, info, flags), at, name, info);
}

int __xstat64(int version, const char *name, struct stat64 *info) { /* of older binaries */
    (void)version;
    return stat64(name, info);
}

/* -- contents -- */

static void wrote(int fd) {
    char path[PATH_MAX];
    struct stat64 info;
    int before = errno;
    if (is("stale") && ours(fd, NULL, path) && fstat64(fd, &info) == 0) note(info.st_ino, 0);
    errno = before;
}

/* How many of `size` bytes at `offset` are taken; -1 with errno: none. */
static ssize_t taken(int fd, size_t size, off_t offset) {
    if (size > 1 && writes_lie(fd, "short")) return 1 + (ssize_t)(draw() % size);
    if (writes_lie(fd, "quota") && seed % 2 == 0 && offset + (off_t)size > 4096) {
        errno = EDQUOT;
        return -1;
    }
    struct stat64 info;
    if (writes_lie(fd, "stripe") && fstat64(fd, &info) == 0 && S_ISREG(info.st_mode)) {
        for (off_t at = offset; at < offset + (off_t)size; at = (at / STRIPE + 1) * STRIPE)
            if (((unsigned)(at / STRIPE) + (unsigned)info.st_ino) % 4 == seed % 4) {
                if (at > offset) return at - offset;
                errno = ENOSPC;
                return -1;
            }
    }
    return (ssize_t)size;
}

static off_t place(int fd) {
    struct stat64 info;
    int flags = fcntl(fd, F_GETFL);
    if (flags >= 0 && (flags & O_APPEND) && fstat64(fd, &info) == 0) return info.st_size;
    off_t offset = lseek(fd, 0, SEEK_CUR);
    return offset < 0 ? 0 : offset;
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    if (is("") || is("late") || is("listing") || is("flock")) return real(fd, data, size);
    int before = errno;
    ssize_t n = taken(fd, size, place(fd));
    if (n < 0) return -1;
    errno = before;
    n = real(fd, data, (size_t)n);
    wrote(fd);
    return n;
}

ssize_t writev(int fd, const struct iovec *parts, int num) {
    REAL(writev);
    char path[PATH_MAX];
    if (num < 1 || !ours(fd, NULL, path)) return real(fd, parts, num);
    return write(fd, parts[0].iov_base, parts[0].iov_len);
}

static int over_quota(int fd) {
    struct stat64 info;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY || !writes_lie(fd, "quota")) return 0;
    if (seed % 2 == 0 || fstat64(fd, &info) || info.st_size <= 4096) return 0;
    return ftruncate64(fd, info.st_size / 2) == 0; /* the server did not take the rest */
}

int fsync(int fd) {
    REAL(fsync);
    struct stat64 info;
    if (over_quota(fd)) { errno = EDQUOT; return -1; }
    if (writes_lie(fd, "fsync") && __sync_fetch_and_add(&table->flushes, 1) == seed) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        if (fstat64(fd, &info) == 0 && S_ISREG(info.st_mode)) {
            int other = open64(link, O_WRONLY | O_CLOEXEC);
            off_t size = info.st_size > 4096 ? 4096 : info.st_size;
            ftruncate64(other, info.st_size - size);
            ftruncate64(other, info.st_size); /* zeros in place of the last page */
            close(other);
        }
        errno = EIO;
        return -1;
    }
    return real(fd);
}

int close(int fd) {
    REAL(close);
    if (!kind) return real(fd);
    int lost = over_quota(fd);
    if (writes_lie(fd, "slow")) {
        struct timespec pause = {(time_t)for_s, (long)((for_s - (double)(time_t)for_s) * 1e9)};
        nanosleep(&pause, NULL);
    }
    int code = real(fd);
    if (lost && code == 0) { errno = EDQUOT; return -1; }
    return code;
}

/* -- locks -- */

int flock(int fd, int how) {
    REAL(flock);
    return is("flock") ? 0 : real(fd, how);
}

int gethostname(char *name, size_t size) {
    REAL(gethostname);
    if (!is("flock")) return real(name, size);
    snprintf(name, size, "%s", node_name);
    return 0;
}

int fcntl64(int fd, int what, ...) {
    REAL(fcntl64);
    va_list more;
    va_start(more, what);
    void *value = va_arg(more, void *);
    va_end(more);
    if ((what == F_SETLK || what == F_SETLKW) && is("flock")) return 0;
    return real(fd, what, value);
}
