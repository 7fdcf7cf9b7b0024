/* A libnvidia-ml.so.1 whose hardware is a text file. `stub.py` builds it and writes the file.

   The file's name is in STUB_NVML; it is read anew on every call, so rewriting it changes the hardware of all
   processes that use it. Without a file the driver is "not loaded". Each line has one fact; the facts of a card follow
   its `card` line:

     driver 550.54.15              cuda 12040                    enumerate init   (count cards at init only)
     fail <function or *> <code>   before the first card: of the whole driver; otherwise of that card
     event <number> <xid> <uuid or ->      (numbers only grow; each event is delivered once per process)

     card <uuid>       name <...>      memory <bytes>     minor <n>       pci <domain:bus:device>, hexadecimal
     nodes <mask>      mig <0|1>       ecc <count>        pending <0|1>   unmappable <0|1>
     process <compute|graphics|mps> <pid> <bytes or -> <MIG instance>
     measures <0|1>    busy <pid> <percent> <microseconds>
     nvlink <active 0|1> <gpu|switch|unknown> <pci of the remote end>      (the first is link 0)
     near <uuid> <level of the common ancestor>

   With -DOLD it is a driver that does not have the newer functions. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15 };
enum { CARDS = 32, FAILURES = 16, PROCESSES = 32, LINKS = 18, EVENTS = 256, DELIVERED = 65536, TEXT = 96 };

typedef unsigned long long Big;
typedef struct { char function[TEXT]; int code; } Failure;
typedef struct { char kind[TEXT]; unsigned pid; Big bytes; unsigned instance; } Running;
typedef struct { unsigned pid, percent; Big when; } Sample;
typedef struct { unsigned active; char kind[TEXT]; unsigned domain, bus, device; } NvLink;
typedef struct { char uuid[TEXT]; unsigned level; } Near;
typedef struct { Big number, xid; char uuid[TEXT]; } XidEvent;

typedef struct {
    char uuid[TEXT], name[TEXT];
    Big memory, nodes, ecc;
    int minor, mig, pending, unmappable;  /* -1: not supported */
    int has_memory, has_ecc, has_pci;
    unsigned domain, bus, device;
    Failure failures[FAILURES]; int failure_count;
    Running running[PROCESSES]; int running_count;
    Sample samples[PROCESSES]; int sample_count, measures;
    NvLink links[LINKS]; unsigned link_count;
    Near near[CARDS]; int near_count;
} Card;

typedef struct {
    int loaded, counts_at_init;
    char driver[TEXT]; int cuda;
    Failure failures[FAILURES]; int failure_count;
    Card cards[CARDS]; int card_count;
    XidEvent events[EVENTS]; int event_count;
} Machine;

/* What NVML's callers see. Layouts are part of its ABI. */
typedef struct { char uuid[TEXT]; } Device;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } PciInfo;
typedef struct { Big total, available, used; } Memory;
typedef struct { unsigned pid; Big bytes; unsigned gpu_instance, compute_instance; } ProcessInfo;
typedef struct { unsigned pid; Big when; unsigned sm, memory, encoder, decoder; } Utilization;
typedef struct { Device *device; Big type, data; unsigned gpu_instance, compute_instance; } EventData;
typedef struct { Device *devices[CARDS]; int count; } EventSet;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Machine machine;                        /* as the file says; read under the lock */
static int inits;                              /* NVML counts them */
static Device handles[CARDS * 8];              /* never freed: a handle outlives its card */
static int handle_count;
static Device *counted[CARDS];                 /* the cards at init, for `enumerate init` */
static int counted_count;
static Big first_event;                        /* events before the first init are not reported */
static int ever;
static Big delivered[DELIVERED];               /* each event is delivered once per process, to whichever set */
static int delivered_count;

/* ---- the file ------------------------------------------------------------------------------------------------------ */

static void word(char *into, const char *from) { snprintf(into, TEXT, "%s", from); }

static void parse(char *line) {
    Machine *m = &machine;
    Card *c = m->card_count ? &m->cards[m->card_count - 1] : NULL;
    char key[TEXT] = "", a[TEXT] = "", b[TEXT] = "", d[TEXT] = "";
    line[strcspn(line, "\n")] = 0;
    if (sscanf(line, "%95s %95s %95s %95s", key, a, b, d) < 2) return;
    const char *rest = strstr(line, a);

    if (!strcmp(key, "driver")) word(m->driver, a);
    else if (!strcmp(key, "cuda")) m->cuda = atoi(a);
    else if (!strcmp(key, "enumerate")) m->counts_at_init = !strcmp(a, "init");
    else if (!strcmp(key, "event") && m->event_count < EVENTS) {
        XidEvent *e = &m->events[m->event_count++];
        e->number = strtoull(a, NULL, 10); e->xid = strtoull(b, NULL, 10); word(e->uuid, d);
    } else if (!strcmp(key, "fail")) {
        Failure *failures = c ? c->failures : m->failures;
        int *count = c ? &c->failure_count : &m->failure_count;
        if (*count < FAILURES) { word(failures[*count].function, a); failures[(*count)++].code = atoi(b); }
    } else if (!strcmp(key, "card") && m->card_count < CARDS) {
        c = &m->cards[m->card_count++];
        memset(c, 0, sizeof *c);
        word(c->uuid, a);
        c->minor = c->mig = c->pending = c->unmappable = -1;
    }
    else if (!c) return;
    else if (!strcmp(key, "name")) word(c->name, rest);
    else if (!strcmp(key, "memory")) { c->memory = strtoull(a, NULL, 10); c->has_memory = 1; }
    else if (!strcmp(key, "minor")) c->minor = atoi(a);
    else if (!strcmp(key, "pci")) c->has_pci = sscanf(a, "%x:%x:%x", &c->domain, &c->bus, &c->device) == 3;
    else if (!strcmp(key, "nodes")) c->nodes = strtoull(a, NULL, 10);
    else if (!strcmp(key, "mig")) c->mig = atoi(a);
    else if (!strcmp(key, "ecc")) { c->ecc = strtoull(a, NULL, 10); c->has_ecc = 1; }
    else if (!strcmp(key, "pending")) c->pending = atoi(a);
    else if (!strcmp(key, "unmappable")) c->unmappable = atoi(a);
    else if (!strcmp(key, "process") && c->running_count < PROCESSES) {
        Running *r = &c->running[c->running_count++];
        char size[TEXT] = "";
        sscanf(line, "%*s %95s %u %95s %u", r->kind, &r->pid, size, &r->instance);
        r->bytes = !strcmp(size, "-") ? ~0ULL : strtoull(size, NULL, 10);  /* all ones: not available */
    } else if (!strcmp(key, "measures")) c->measures = atoi(a);
    else if (!strcmp(key, "busy") && c->sample_count < PROCESSES) {
        Sample *s = &c->samples[c->sample_count++];
        sscanf(line, "%*s %u %u %llu", &s->pid, &s->percent, &s->when);
    } else if (!strcmp(key, "nvlink") && c->link_count < LINKS) {
        NvLink *l = &c->links[c->link_count++];
        l->active = (unsigned)atoi(a); word(l->kind, b);
        sscanf(d, "%x:%x:%x", &l->domain, &l->bus, &l->device);
    } else if (!strcmp(key, "near") && c->near_count < CARDS) {
        word(c->near[c->near_count].uuid, a); c->near[c->near_count++].level = (unsigned)atoi(b);
    }
}

static void read_machine(void) {
    const char *path = getenv("STUB_NVML");
    char line[512];
    machine.loaded = machine.counts_at_init = machine.cuda = machine.driver[0] = 0;
    machine.failure_count = machine.card_count = machine.event_count = 0;
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return;
    machine.loaded = 1;
    while (fgets(line, sizeof line, file)) parse(line);
    fclose(file);
}

/* ---- failures -------------------------------------------------------------------------------------------------------- */

static Device *handle_of(const char *uuid) {
    for (int i = 0; i < handle_count; i++)
        if (!strcmp(handles[i].uuid, uuid)) return &handles[i];
    if (handle_count == CARDS * 8) return NULL;
    word(handles[handle_count].uuid, uuid);
    return &handles[handle_count++];
}

static Card *card_of(const char *uuid) {
    for (int i = 0; i < machine.card_count; i++)
        if (!strcmp(machine.cards[i].uuid, uuid)) return &machine.cards[i];
    return NULL;
}

static int listed(const Failure *failures, int count, const char *function) {
    for (int i = 0; i < count; i++)
        if (!strcmp(failures[i].function, function) || !strcmp(failures[i].function, "*")) return failures[i].code;
    return SUCCESS;
}

static int driver_says(const char *function) {
    read_machine();
    if (!machine.loaded) return DRIVER_NOT_LOADED;
    return listed(machine.failures, machine.failure_count, function);
}

static int begin(const char *function) {
    int code = driver_says(function);
    return code ? code : inits > 0 ? SUCCESS : UNINITIALIZED;
}

static int card_says(const Device *device, const char *function, Card **card) {
    int code = begin(function);
    if (code) return code;
    if (!device) return INVALID_ARGUMENT;
    *card = card_of(device->uuid);
    return *card ? listed((*card)->failures, (*card)->failure_count, function) : GPU_IS_LOST;
}

/* A function without a card, and one of `device`: `answer` is its body when no failure is set. */
#define DRIVER(name, parameters, answer) \
    int name parameters { \
        pthread_mutex_lock(&lock); \
        int code = begin(__func__); \
        if (code == SUCCESS) { answer } \
        pthread_mutex_unlock(&lock); \
        return code; \
    }
#define ABOUT(name, parameters, answer) \
    int name parameters { \
        pthread_mutex_lock(&lock); \
        Card *card = NULL; \
        int code = card_says(device, __func__, &card); \
        if (code == SUCCESS) { answer } \
        pthread_mutex_unlock(&lock); \
        return code; \
    }
#define SAY(is_said, ...) if (is_said) { __VA_ARGS__ } else code = NOT_SUPPORTED;

/* ---- init ------------------------------------------------------------------------------------------------------------ */

static int start(unsigned flags) {
    int code = driver_says("nvmlInit");
    if (code) return code;
    if (!machine.card_count && !(flags & 1)) return NOT_FOUND;  /* 1: no cards is no failure */
    for (int i = 0; !ever && i < machine.event_count; i++)
        if (machine.events[i].number > first_event) first_event = machine.events[i].number;
    ever = 1;
    if (inits++ == 0)
        for (counted_count = 0; counted_count < machine.card_count; counted_count++)
            counted[counted_count] = handle_of(machine.cards[counted_count].uuid);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    pthread_mutex_lock(&lock);
    int code = start(flags);
    pthread_mutex_unlock(&lock);
    return code;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    int code = inits > 0 ? SUCCESS : UNINITIALIZED;
    if (inits > 0) inits--;
    pthread_mutex_unlock(&lock);
    return code;
}

const char *nvmlErrorString(int code) { static char text[32]; snprintf(text, sizeof text, "code %d", code); return text; }

DRIVER(nvmlSystemGetDriverVersion, (char *into, unsigned size),
       SAY(machine.driver[0], snprintf(into, size, "%s", machine.driver);))
DRIVER(nvmlSystemGetCudaDriverVersion_v2, (int *version), SAY(machine.cuda, *version = machine.cuda;))

/* ---- cards ----------------------------------------------------------------------------------------------------------- */

static int count_cards(void) { return machine.counts_at_init ? counted_count : machine.card_count; }

static Device *device_at(int index) {
    return machine.counts_at_init ? counted[index] : handle_of(machine.cards[index].uuid);
}

static int hand_over(Device *found, const char *function, Device **device) {
    Card *card = NULL;
    int code = card_says(found, function, &card);
    if (code == SUCCESS) *device = found;
    return code;
}

DRIVER(nvmlDeviceGetCount_v2, (unsigned *count), *count = (unsigned)count_cards();)
DRIVER(nvmlDeviceGetHandleByIndex_v2, (unsigned index, Device **device),
       code = (int)index < count_cards() ? hand_over(device_at((int)index), __func__, device) : INVALID_ARGUMENT;)
DRIVER(nvmlDeviceGetHandleByUUID, (const char *uuid, Device **device),
       code = card_of(uuid) ? hand_over(handle_of(uuid), __func__, device) : NOT_FOUND;)

static void put_pci(PciInfo *info, unsigned domain, unsigned bus, unsigned device) {
    memset(info, 0, sizeof *info);
    info->domain = domain; info->bus = bus; info->device = device;
    snprintf(info->legacy, sizeof info->legacy, "%04X:%02X:%02X.0", domain & 0xffff, bus & 0xff, device & 0xff);
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", domain, bus, device);
}

ABOUT(nvmlDeviceGetUUID, (Device *device, char *into, unsigned size), snprintf(into, size, "%s", card->uuid);)
ABOUT(nvmlDeviceGetName, (Device *device, char *into, unsigned size),
      SAY(card->name[0], snprintf(into, size, "%s", card->name);))
ABOUT(nvmlDeviceGetMemoryInfo, (Device *device, Memory *memory),
      SAY(card->has_memory, memory->total = memory->available = card->memory; memory->used = 0;))
ABOUT(nvmlDeviceGetMinorNumber, (Device *device, unsigned *minor), SAY(card->minor >= 0, *minor = (unsigned)card->minor;))
ABOUT(nvmlDeviceGetPciInfo_v3, (Device *device, PciInfo *info),
      SAY(card->has_pci, put_pci(info, card->domain, card->bus, card->device);))
ABOUT(nvmlDeviceGetTotalEccErrors, (Device *device, int kind, int counter, Big *errors),
      SAY(card->has_ecc && kind == 1 && counter == 0, *errors = card->ecc;))
ABOUT(nvmlDeviceGetRetiredPagesPendingStatus, (Device *device, int *pending),
      SAY(card->pending >= 0, *pending = card->pending;))
#ifndef OLD
ABOUT(nvmlDeviceGetRemappedRows, (Device *device, unsigned *good, unsigned *bad, unsigned *pending, unsigned *failed),
      SAY(card->unmappable >= 0, *good = *bad = *pending = 0; *failed = (unsigned)card->unmappable;))
ABOUT(nvmlDeviceGetMigMode, (Device *device, unsigned *now, unsigned *next),
      SAY(card->mig >= 0, *now = *next = (unsigned)card->mig;))
ABOUT(nvmlDeviceGetMemoryAffinity, (Device *device, unsigned words, unsigned long *nodes, unsigned scope),
      SAY(card->nodes && scope == 0, memset(nodes, 0, words * sizeof *nodes); nodes[0] = (unsigned long)card->nodes;))
#endif

/* ---- processes ------------------------------------------------------------------------------------------------------- */

static int list_running(const Card *card, const char *kind, unsigned *count, ProcessInfo *into) {
    unsigned room = *count, found = 0;
    for (int i = 0; i < card->running_count; i++) {
        const Running *r = &card->running[i];
        if (strcmp(r->kind, kind)) continue;
        if (into && found < room) into[found] = (ProcessInfo){r->pid, r->bytes, r->instance, 0};
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#ifndef OLD
static int list_samples(const Card *card, Big since, unsigned *count, Utilization *into) {
    unsigned room = *count, found = 0;
    for (int i = 0; i < card->sample_count; i++) {
        const Sample *s = &card->samples[i];
        if (s->when <= since) continue;
        if (into && found < room) into[found] = (Utilization){s->pid, s->when, s->percent, 0, 0, 0};
        found++;
    }
    *count = found;
    if (!card->sample_count) return SUCCESS;  /* "never a sample" and "no new sample" have different codes */
    return !found ? NOT_FOUND : found > room ? INSUFFICIENT_SIZE : SUCCESS;
}
#endif

#ifdef OLD
#define nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetComputeRunningProcesses_v2
#define nvmlDeviceGetGraphicsRunningProcesses_v3 nvmlDeviceGetGraphicsRunningProcesses_v2
#endif
ABOUT(nvmlDeviceGetComputeRunningProcesses_v3, (Device *device, unsigned *count, ProcessInfo *into),
      code = list_running(card, "compute", count, into);)
ABOUT(nvmlDeviceGetGraphicsRunningProcesses_v3, (Device *device, unsigned *count, ProcessInfo *into),
      code = list_running(card, "graphics", count, into);)
#ifndef OLD
ABOUT(nvmlDeviceGetMPSComputeRunningProcesses_v3, (Device *device, unsigned *count, ProcessInfo *into),
      code = list_running(card, "mps", count, into);)
ABOUT(nvmlDeviceGetProcessUtilization, (Device *device, Utilization *into, unsigned *count, Big since),
      code = card->measures ? list_samples(card, since, count, into) : NOT_SUPPORTED;)
#endif

/* ---- links ----------------------------------------------------------------------------------------------------------- */

static int level_between(const Card *card, const Device *other, unsigned *level) {
    for (int i = 0; i < card->near_count; i++)
        if (!strcmp(card->near[i].uuid, other->uuid)) { *level = card->near[i].level; return SUCCESS; }
    return NOT_SUPPORTED;
}

ABOUT(nvmlDeviceGetTopologyCommonAncestor, (Device *device, Device *other, unsigned *level),
      code = level_between(card, other, level);)
ABOUT(nvmlDeviceGetNvLinkState, (Device *device, unsigned link, unsigned *active),
      SAY(link < card->link_count, *active = card->links[link].active;))
ABOUT(nvmlDeviceGetNvLinkRemotePciInfo_v2, (Device *device, unsigned link, PciInfo *info),
      SAY(link < card->link_count,
          NvLink *l = &card->links[link]; put_pci(info, l->domain, l->bus, l->device);))
#ifndef OLD
ABOUT(nvmlDeviceGetNvLinkRemoteDeviceType, (Device *device, unsigned link, unsigned *kind),
      SAY(link < card->link_count && strcmp(card->links[link].kind, "unknown"),
          *kind = strcmp(card->links[link].kind, "switch") ? 0 : 2;))
#endif

/* ---- XID events -------------------------------------------------------------------------------------------------------- */

static int registered(const EventSet *set, const char *uuid) {
    if (!strcmp(uuid, "-")) return 1;
    for (int i = 0; i < set->count; i++)
        if (!strcmp(set->devices[i]->uuid, uuid)) return 1;
    return 0;
}

static int was_delivered(Big number) {
    for (int i = 0; i < delivered_count; i++)
        if (delivered[i] == number) return 1;
    return 0;
}

static int next_event(EventSet *set, EventData *data) {
    for (int i = 0; i < machine.event_count && delivered_count < DELIVERED; i++) {
        XidEvent *e = &machine.events[i];
        if (e->number <= first_event || was_delivered(e->number) || !registered(set, e->uuid)) continue;
        delivered[delivered_count++] = e->number;
        *data = (EventData){strcmp(e->uuid, "-") ? handle_of(e->uuid) : NULL, 8, e->xid, ~0U, ~0U};
        return SUCCESS;
    }
    return TIMEOUT;
}

DRIVER(nvmlEventSetCreate, (EventSet **set), *set = calloc(1, sizeof **set);)
DRIVER(nvmlEventSetFree, (EventSet *set), free(set);)
ABOUT(nvmlDeviceRegisterEvents, (Device *device, Big types, EventSet *set),
      SAY(types == 8 && set->count < CARDS, set->devices[set->count++] = device;))

int nvmlEventSetWait_v2(EventSet *set, EventData *data, unsigned milliseconds) {
    const struct timespec pause = {0, 10 * 1000 * 1000};
    for (unsigned waited = 0;; waited += 10) {
        pthread_mutex_lock(&lock);
        int code = begin(__func__);
        if (code == SUCCESS) code = next_event(set, data);
        pthread_mutex_unlock(&lock);
        if (code != TIMEOUT || waited >= milliseconds) return code;
        nanosleep(&pause, NULL);
    }
}
