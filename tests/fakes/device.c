/* libnvidia-ml of FAKE_DEVICES devices. Their memory is that of the processes which say so in a file of FAKE_DEVICE, in
   bytes, for as long as they live: as with a real one, what a killed process held comes free by itself. A file is named
   by the pid, of what it has on every device, or PID.DEVICE. Files `ecc.DEVICE`, `remap.DEVICE` and `lost.DEVICE` hold
   how many errors could not be corrected, whether a row could not be remapped, and whether the device is lost. Each
   line of `xid.DEVICE` is an XID, which a process is told of if it came after its registration. */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned long long total, free, used; } memory;
typedef struct { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event;

static unsigned long long said(const char *what, void *handle) {
    char path[4096];
    unsigned long long found = 0;
    snprintf(path, sizeof path, "%s/%s.%zu", getenv("FAKE_DEVICE"), what, (size_t)handle - 1);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    if (fscanf(file, "%llu", &found) != 1) found = 0;
    fclose(file);
    return found;
}

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = atoi(getenv("FAKE_DEVICES")); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(size_t)(index + 1);
    return said("lost", *handle) ? 15 : 0;
}

#ifndef OLD
int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, unsigned long long *count) {
    if (type != 1 || counter != 0) return 2;
    *count = said("ecc", handle);
    return 0;
}

int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    *corrected = *uncorrected = *pending = 0;
    *failed = said("remap", handle) != 0;
    return 0;
}

static int told[64]; /* XIDs of each device that the process knows, and one more; 0: not registered */

/* Return XID `number` of a device, or 0 if there are fewer. */
static unsigned long long xid(size_t device, int number) {
    char path[4096];
    unsigned long long found = 0;
    snprintf(path, sizeof path, "%s/xid.%zu", getenv("FAKE_DEVICE"), device);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    for (int line = 0; line <= number; line++)
        if (fscanf(file, "%llu", &found) != 1) { found = 0; break; }
    fclose(file);
    return found;
}

int nvmlEventSetCreate(void **set) { *set = told; return 0; }

int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *set) {
    size_t device = (size_t)handle - 1;
    if (types != 8 || set != told) return 2;
    for (told[device] = 1; xid(device, told[device] - 1);) told[device]++;
    return 0;
}

int nvmlEventSetWait_v2(void *set, event *found, unsigned timeout_ms) {
    if (set != told) return 2;
    for (size_t device = 0; device < 64; device++) {
        unsigned long long number = told[device] ? xid(device, told[device] - 1) : 0;
        if (!number) continue;
        told[device]++;
        *found = (event){(void *)(device + 1), 8, number, -1, -1};
        return 0;
    }
    usleep(timeout_ms * 1000);
    return 10;
}
#endif

int nvmlDeviceGetMemoryInfo(void *handle, memory *found) {
    const char *root = getenv("FAKE_DEVICE");
    DIR *directory = root ? opendir(root) : NULL;
    if (!handle || !directory) return 999;
    found->total = 80ULL << 30;
    found->used = 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        int pid = atoi(entry->d_name);
        char path[4096];
        unsigned long long bytes;
        if (pid <= 0 || kill(pid, 0) != 0) continue;
        const char *device = strchr(entry->d_name, '.');
        if (device && handle != (void *)(size_t)(atoi(device + 1) + 1)) continue;
        snprintf(path, sizeof path, "%s/%s", root, entry->d_name);
        FILE *file = fopen(path, "r");
        if (!file) continue;
        if (fscanf(file, "%llu", &bytes) == 1) found->used += bytes;
        fclose(file);
    }
    closedir(directory);
    found->free = found->total - found->used;
    return 0;
}
