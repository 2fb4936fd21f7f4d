/* For LD_PRELOAD: a disk that takes FSYNC_S seconds for each fsync, and names that nobody resolves within RESOLVE_S
   seconds, or that all lead to RESOLVE_TO, as a resolver that hangs or lies. Addresses are resolved as they are. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <stdlib.h>
#include <unistd.h>

static void wait_for(const char *name) {
    const char *seconds = getenv(name);
    if (seconds) sleep(atoi(seconds));
}

int fsync(int file) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    wait_for("FSYNC_S");
    return real(file);
}

int fdatasync(int file) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    wait_for("FSYNC_S");
    return real(file);
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        (int (*)(const char *, const char *, const struct addrinfo *, struct addrinfo **))dlsym(RTLD_NEXT, "getaddrinfo");
    unsigned char address[sizeof(struct in6_addr)];
    const char *to = getenv("RESOLVE_TO");
    if (!node || inet_pton(AF_INET, node, address) == 1 || inet_pton(AF_INET6, node, address) == 1)
        return real(node, service, hints, found);
    if (to) return real(to, service, hints, found);
    if (!getenv("RESOLVE_S")) return real(node, service, hints, found);
    wait_for("RESOLVE_S");
    return EAI_AGAIN;
}
