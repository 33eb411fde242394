/* The bytes of NVMe over TCP, for the initiator and the test enclosure: structures and numbers only. All little-endian.
 *
 * From the public specifications. NVM Express TCP Transport 1.0: PDUs. NVM Express Base 2.0: queue entries, properties, Identify, log pages, Fabrics
 * commands. NVM Command Set 1.0: Read, Write, Identify Namespace.
 */
#ifndef KVFS_NVME_WIRE_H
#define KVFS_NVME_WIRE_H

#include <assert.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the structures here are read and written as they lie in memory"
#endif

#define NVME_PACKED __attribute__((packed))
#define NVME_NQN_SIZE 256 /* a field; a name is at most 223 bytes and ends with a zero */
#define NVME_NQN_MAX 223
#define NVME_DISCOVERY_NQN "nqn.2014-08.org.nvmexpress.discovery"
#define NVME_TCP_PORT 4420
#define NVME_DISCOVERY_PORT 8009

/* ---- PDUs (TCP transport 3.6) ---- */

enum nvme_pdu_type {
    NVME_PDU_ICREQ = 0,
    NVME_PDU_ICRESP = 1,
    NVME_PDU_H2C_TERM = 2,
    NVME_PDU_C2H_TERM = 3,
    NVME_PDU_COMMAND = 4,
    NVME_PDU_RESPONSE = 5,
    NVME_PDU_H2C_DATA = 6,
    NVME_PDU_C2H_DATA = 7,
    NVME_PDU_R2T = 9
};
enum nvme_pdu_flags { NVME_PDU_HDGST = 1, NVME_PDU_DDGST = 2, NVME_PDU_LAST = 4 /* data */, NVME_PDU_SUCCESS = 8 /* C2HData */ };
#define NVME_DIGEST_SIZE 4

/* Behind the hlen bytes of a header: its digest if HDGST, zeros until `pdo`, the data, its digest if DDGST. plen counts all of it. */
struct nvme_pdu {
    uint8_t type;
    uint8_t flags;
    uint8_t hlen; /* of the header, this included; without its digest */
    uint8_t pdo;  /* start of the data, from the first byte of the PDU; 0 without data */
    uint32_t plen;
} NVME_PACKED;
static_assert(sizeof(struct nvme_pdu) == 8, "wire");

enum nvme_digests { NVME_DIGEST_HEADER = 1, NVME_DIGEST_DATA = 2 };

struct nvme_icreq {
    struct nvme_pdu head; /* hlen and plen 128; never a digest */
    uint16_t pfv;         /* 0 */
    uint8_t hpda;         /* C2HData's data at multiples of (hpda + 1) * 4; at most 31 */
    uint8_t digests;      /* enum nvme_digests: wanted */
    uint32_t maxr2t;      /* R2Ts a command may have open, less one */
    uint8_t reserved[112];
} NVME_PACKED;
static_assert(sizeof(struct nvme_icreq) == 128, "wire");

struct nvme_icresp {
    struct nvme_pdu head;
    uint16_t pfv;
    uint8_t cpda;        /* as hpda, for the host's PDUs with data */
    uint8_t digests;     /* used, both ways, among those wanted */
    uint32_t maxh2cdata; /* bytes of data in one H2CData; a multiple of 4, at least 4096 */
    uint8_t reserved[112];
} NVME_PACKED;
static_assert(sizeof(struct nvme_icresp) == 128, "wire");

enum nvme_fatal_error {
    NVME_FES_HEADER_FIELD = 1,
    NVME_FES_SEQUENCE = 2,
    NVME_FES_HEADER_DIGEST = 3,
    NVME_FES_RANGE = 4,
    NVME_FES_LIMIT = 5,
    NVME_FES_PARAMETER = 6
};
/* H2CTermReq and C2HTermReq. Its data is the header of the PDU that was in error. No digests. */
struct nvme_term {
    struct nvme_pdu head;
    uint16_t fes; /* enum nvme_fatal_error */
    uint32_t fei; /* HEADER_FIELD and PARAMETER: the field's offset in the header; HEADER_DIGEST: the digest received */
    uint8_t reserved[10];
} NVME_PACKED;
static_assert(sizeof(struct nvme_term) == 24, "wire");
#define NVME_TERM_DATA_MAX 128

/* H2CData, C2HData. */
struct nvme_data {
    struct nvme_pdu head;
    uint16_t cid;
    uint16_t ttag;   /* H2CData: the R2T's; else 0 */
    uint32_t offset; /* in the command's data */
    uint32_t size;
    uint32_t reserved;
} NVME_PACKED;
static_assert(sizeof(struct nvme_data) == 24, "wire");

struct nvme_r2t {
    struct nvme_pdu head;
    uint16_t cid;
    uint16_t ttag;
    uint32_t offset;
    uint32_t size;
    uint32_t reserved;
} NVME_PACKED;
static_assert(sizeof(struct nvme_r2t) == 24, "wire");

/* ---- queue entries (base 3.3.3) ---- */

enum nvme_sgl_id { NVME_SGL_IN_CAPSULE = 0x01, NVME_SGL_TRANSPORT = 0x5a };
struct nvme_sgl {
    uint64_t address; /* IN_CAPSULE: where in the capsule's data; else 0 */
    uint32_t size;
    uint8_t reserved[3];
    uint8_t id; /* enum nvme_sgl_id */
} NVME_PACKED;
static_assert(sizeof(struct nvme_sgl) == 16, "wire");

#define NVME_COMMAND_SGL 0x40 /* in `flags`: PSDT 01b, always so over fabrics */

/* A submission queue entry. */
struct nvme_command {
    uint8_t opcode;
    uint8_t flags;
    uint16_t cid;
    uint32_t nsid; /* Fabrics commands: their fctype in the low byte */
    uint32_t cdw2, cdw3;
    uint64_t metadata;
    struct nvme_sgl sgl;
    uint32_t cdw10, cdw11, cdw12, cdw13, cdw14, cdw15;
} NVME_PACKED;
static_assert(sizeof(struct nvme_command) == 64, "wire");

/* A completion queue entry. */
struct nvme_completion {
    union {
        struct {
            uint32_t dw0, dw1;
        };
        uint64_t value; /* Property Get */
    };
    uint16_t sqhd; /* the submission queue's head: slots that are free again */
    uint16_t sqid; /* 0 over fabrics */
    uint16_t cid;
    uint16_t status; /* bit 0 unused; NVME_STATUS(...) << 1 */
} NVME_PACKED;
static_assert(sizeof(struct nvme_completion) == 16, "wire");

struct nvme_command_pdu {
    struct nvme_pdu head;
    struct nvme_command command;
} NVME_PACKED;
static_assert(sizeof(struct nvme_command_pdu) == 72, "wire");
struct nvme_response_pdu {
    struct nvme_pdu head;
    struct nvme_completion completion;
} NVME_PACKED;
static_assert(sizeof(struct nvme_response_pdu) == 24, "wire");

/* A status without the unused bit: code, code type, and these bits. */
#define NVME_STATUS(type, code) ((uint16_t)((type) << 8 | (code)))
#define NVME_STATUS_MORE 0x2000
#define NVME_STATUS_DNR 0x4000 /* do not retry */
/* clang-format off */
enum nvme_status {
    NVME_SC_SUCCESS = 0, NVME_SC_INVALID_OPCODE = 0x001, NVME_SC_INVALID_FIELD = 0x002, NVME_SC_CID_CONFLICT = 0x003,
    NVME_SC_TRANSFER_ERROR = 0x004, NVME_SC_INTERNAL = 0x006, NVME_SC_ABORTED = 0x007, NVME_SC_ABORTED_SQ_DELETED = 0x008,
    NVME_SC_INVALID_NAMESPACE = 0x00b, NVME_SC_SEQUENCE = 0x00c, NVME_SC_SGL_LENGTH = 0x00f, NVME_SC_SGL_TYPE = 0x011,
    NVME_SC_SGL_OFFSET = 0x016,
    NVME_SC_KATO_EXPIRED = 0x018, NVME_SC_TRANSIENT_TRANSPORT = 0x022, NVME_SC_LBA_RANGE = 0x080, NVME_SC_CAPACITY = 0x081,
    NVME_SC_NOT_READY = 0x082, NVME_SC_RESERVATION_CONFLICT = 0x083,
    NVME_SC_INVALID_QUEUE = 0x101, NVME_SC_AER_LIMIT = 0x105, NVME_SC_INVALID_LOG_PAGE = 0x109, NVME_SC_FEATURE_NOT_SAVEABLE = 0x10d,
    NVME_SC_CONNECT_FORMAT = 0x180, NVME_SC_CONNECT_BUSY = 0x181, NVME_SC_CONNECT_PARAMETER = 0x182,
    NVME_SC_CONNECT_RESTART_DISCOVERY = 0x183, NVME_SC_CONNECT_HOST = 0x184, NVME_SC_DISCONNECT_QUEUE_TYPE = 0x185,
    NVME_SC_WRITE_FAULT = 0x280, NVME_SC_READ_ERROR = 0x281, NVME_SC_PATH_INTERNAL = 0x300, NVME_SC_PATH_HOST_ABORTED = 0x371
};
/* clang-format on */

/* ---- Fabrics commands (base 3.3, 6) ---- */

#define NVME_OPCODE_FABRICS 0x7f
enum nvme_fctype { NVME_PROPERTY_SET = 0x00, NVME_CONNECT = 0x01, NVME_PROPERTY_GET = 0x04, NVME_DISCONNECT = 0x08 };

struct nvme_connect {
    uint8_t opcode, flags;
    uint16_t cid;
    uint8_t fctype;
    uint8_t reserved[19];
    struct nvme_sgl sgl;
    uint16_t recfmt; /* 0 */
    uint16_t qid;
    uint16_t sqsize; /* entries less one */
    uint8_t cattr;
    uint8_t reserved2;
    uint32_t kato_ms; /* of the admin queue; 0: no keep alive */
    uint8_t reserved3[12];
} NVME_PACKED;
static_assert(sizeof(struct nvme_connect) == 64, "wire");
#define NVME_CONNECT_NO_SQ_FLOW 0x04 /* cattr: sqhd is not used; without this no C2HData may carry SUCCESS */

struct nvme_connect_data {
    uint8_t hostid[16];
    uint16_t cntlid; /* of the admin queue's Connect; there NVME_CNTLID_DYNAMIC */
    uint8_t reserved[238];
    char subnqn[NVME_NQN_SIZE];
    char hostnqn[NVME_NQN_SIZE];
    uint8_t reserved2[256];
} NVME_PACKED;
static_assert(sizeof(struct nvme_connect_data) == 1024, "wire");
#define NVME_CNTLID_DYNAMIC 0xffff
/* Connect's answer: dw0's low half is the controller id. With CONNECT_PARAMETER it is the offset of the wrong field; bit 16 is set if the field is in
 * the data. */

struct nvme_property {
    uint8_t opcode, flags;
    uint16_t cid;
    uint8_t fctype;
    uint8_t reserved[35];
    uint8_t attrib; /* 0: 4 bytes, 1: 8 bytes */
    uint8_t reserved2[3];
    uint32_t offset; /* enum nvme_property_offset */
    uint64_t value;  /* Property Set */
    uint8_t reserved3[8];
} NVME_PACKED;
static_assert(sizeof(struct nvme_property) == 64, "wire");

enum nvme_property_offset { NVME_CAP = 0x00, NVME_VS = 0x08, NVME_CC = 0x14, NVME_CSTS = 0x1c, NVME_NSSR = 0x20 };
#define NVME_CAP_MQES(cap) ((uint32_t)((cap) & 0xffff) + 1)             /* entries of a queue */
#define NVME_CAP_TIMEOUT_MS(cap) ((uint32_t)((cap) >> 24 & 0xff) * 500) /* for CSTS.RDY to follow CC.EN */
#define NVME_CAP_CQR (1ull << 16)
#define NVME_CAP_CSS_NVM (1ull << 37)
#define NVME_VS_1_4 0x00010400u
#define NVME_VS_2_0 0x00020000u
#define NVME_CC_EN 0x1u
#define NVME_CC_SHN 0xc000u
#define NVME_CC_SHN_NORMAL 0x4000u
#define NVME_CC_QUEUE_SIZES (6u << 16 | 4u << 20) /* 64 byte commands, 16 byte completions */
#define NVME_CSTS_RDY 0x1u
#define NVME_CSTS_CFS 0x2u
#define NVME_CSTS_SHST 0xcu
#define NVME_CSTS_SHST_DONE 0x8u

/* ---- admin commands (base 5) ---- */

enum nvme_admin_opcode {
    NVME_ADMIN_GET_LOG_PAGE = 0x02,
    NVME_ADMIN_IDENTIFY = 0x06,
    NVME_ADMIN_ABORT = 0x08,
    NVME_ADMIN_SET_FEATURES = 0x09,
    NVME_ADMIN_GET_FEATURES = 0x0a,
    NVME_ADMIN_ASYNC_EVENT = 0x0c,
    NVME_ADMIN_KEEP_ALIVE = 0x18
};
enum nvme_identify_cns {
    NVME_CNS_NAMESPACE = 0x00,
    NVME_CNS_CONTROLLER = 0x01,
    NVME_CNS_ACTIVE_NAMESPACES = 0x02,
    NVME_CNS_DESCRIPTORS = 0x03,
    NVME_CNS_CSI_NAMESPACE = 0x05,
    NVME_CNS_CSI_CONTROLLER = 0x06
};
enum nvme_feature {
    NVME_FEATURE_WRITE_CACHE = 0x06,
    NVME_FEATURE_QUEUES = 0x07,
    NVME_FEATURE_ASYNC_EVENTS = 0x0b,
    NVME_FEATURE_KATO = 0x0f,
    NVME_FEATURE_HOST_ID = 0x81
};
enum nvme_log {
    NVME_LOG_ERRORS = 0x01,
    NVME_LOG_SMART = 0x02,
    NVME_LOG_FIRMWARE = 0x03,
    NVME_LOG_CHANGED_NAMESPACES = 0x04,
    NVME_LOG_EFFECTS = 0x05,
    NVME_LOG_DISCOVERY = 0x70
};
/* Get Log Page, `count` = dwords - 1: cdw10 = lid | RAE << 15 | low half of `count` << 16; cdw11 = high half. cdw12 and cdw13 = offset in bytes. */
#define NVME_LOG_RETAIN_EVENT 0x8000u
/* FEATURE_QUEUES: submission queues - 1 | (completion queues - 1) << 16, in cdw11 and in the answer's dw0.
 * Abort: cdw10 = sqid | cid << 16; dw0 bit 0 of the answer is set if nothing was aborted.
 * Async event: dw0 = type | info << 8 | log << 16. */
enum nvme_event_type { NVME_EVENT_ERROR = 0, NVME_EVENT_NOTICE = 2 };
enum nvme_event_notice { NVME_NOTICE_NAMESPACES = 0x00, NVME_NOTICE_DISCOVERY = 0xf0 };
/* FEATURE_ASYNC_EVENTS, and Identify's oaes. */
#define NVME_ASYNC_NAMESPACES (1u << 8)
#define NVME_ASYNC_DISCOVERY (1u << 31)

struct nvme_controller { /* CNS 1 */
    uint16_t vid, ssvid; /* 0 */
    char serial[20];     /* the texts are padded with spaces */
    char model[40];
    char firmware[8];
    uint8_t rab, ieee[3], cmic; /* 72 */
    uint8_t mdts;               /* 77: largest transfer 2^mdts * 4096 bytes (CAP.MPSMIN 0); 0: no limit */
    uint16_t cntlid;            /* 78 */
    uint32_t ver, rtd3r, rtd3e, oaes, ctratt;
    uint8_t reserved100[11];
    uint8_t controller_type; /* 111: 1 I/O, 2 discovery */
    uint8_t reserved112[144];
    uint16_t oacs;     /* 256 */
    uint8_t acl, aerl; /* Aborts, Async Events at once, less one */
    uint8_t frmw, lpa, elpe, npss, avscc, apsta;
    uint16_t wctemp, cctemp, mtfa;
    uint8_t reserved272[48];
    uint16_t kas; /* 320: keep alive granularity in 100 ms; 0: none */
    uint8_t reserved322[190];
    uint8_t sqes, cqes;   /* 512: 0x66, 0x44 */
    uint16_t maxcmd;      /* 514: commands at once in a queue */
    uint32_t nn;          /* 516 */
    uint16_t oncs, fuses; /* 520 */
    uint8_t fna, vwc;     /* 525: bit 0: volatile write cache */
    uint16_t awun, awupf;
    uint8_t icsvscc, nwpc;
    uint16_t acwu, ocfs;
    uint32_t sgls; /* 536 */
    uint32_t mnan;
    uint8_t reserved544[224];
    char subnqn[NVME_NQN_SIZE]; /* 768 */
    uint8_t reserved1024[768];
    uint32_t ioccsz; /* 1792: a command capsule in 16 bytes: in-capsule data may be ioccsz * 16 - 64 bytes */
    uint32_t iorcsz; /* a response capsule in 16 bytes: 1 */
    uint16_t icdoff;
    uint8_t fcatt, msdbd;
    uint16_t ofcs;
    uint8_t reserved1806[242];
    uint8_t power_states[1024]; /* 2048 */
    uint8_t vendor[1024];
} NVME_PACKED;
static_assert(sizeof(struct nvme_controller) == 4096, "wire");
static_assert(__builtin_offsetof(struct nvme_controller, kas) == 320 && __builtin_offsetof(struct nvme_controller, sqes) == 512 &&
                  __builtin_offsetof(struct nvme_controller, sgls) == 536 && __builtin_offsetof(struct nvme_controller, subnqn) == 768 &&
                  __builtin_offsetof(struct nvme_controller, ioccsz) == 1792 && __builtin_offsetof(struct nvme_controller, mdts) == 77,
              "wire");
#define NVME_ONCS_DATASET (1u << 2)
#define NVME_ONCS_WRITE_ZEROES (1u << 3)
#define NVME_ONCS_RESERVATIONS (1u << 5)
#define NVME_SGLS_FABRICS (1u << 0 | 1u << 20) /* SGLs without alignment; offsets in the capsule's data */

struct nvme_lba_format {
    uint16_t metadata_size;
    uint8_t lbads;
    uint8_t rp;
} NVME_PACKED; /* lbads: log2 of the block's bytes */

struct nvme_namespace {        /* CNS 0 */
    uint64_t nsze, ncap, nuse; /* in blocks; all zero: no such active namespace */
    uint8_t nsfeat, nlbaf;
    uint8_t flbas; /* 26: low 4 bits: which of lbaf */
    uint8_t mc, dpc, dps;
    uint8_t nmic, rescap, fpi, dlfeat; /* 30; dlfeat 9: deallocated blocks read as zeros, write zeroes may deallocate */
    uint16_t nawun, nawupf, nacwu, nabsn, nabo, nabspf, noiob;
    uint8_t nvmcap[16]; /* 48 */
    uint16_t npwg, npwa, npdg, npda, nows;
    uint8_t reserved74[18];
    uint32_t anagrpid; /* 92 */
    uint8_t reserved96[3], nsattr;
    uint16_t nvmsetid, endgid;
    uint8_t nguid[16];               /* 104 */
    uint8_t eui64[8];                /* 120 */
    struct nvme_lba_format lbaf[64]; /* 128 */
    uint8_t reserved384[3712];
} NVME_PACKED;
static_assert(sizeof(struct nvme_namespace) == 4096, "wire");
static_assert(__builtin_offsetof(struct nvme_namespace, flbas) == 26 && __builtin_offsetof(struct nvme_namespace, nvmcap) == 48 &&
                  __builtin_offsetof(struct nvme_namespace, nguid) == 104 && __builtin_offsetof(struct nvme_namespace, lbaf) == 128,
              "wire");
#define NVME_DATA_DEALLOCATE_ZEROES 0x09

/* CNS 3: a list of these, each with `size` bytes behind it; type 0 ends it. */
enum nvme_descriptor_type { NVME_DESCRIPTOR_EUI64 = 1, NVME_DESCRIPTOR_NGUID = 2, NVME_DESCRIPTOR_UUID = 3, NVME_DESCRIPTOR_CSI = 4 };
struct nvme_descriptor {
    uint8_t type, size;
    uint16_t reserved;
} NVME_PACKED;

struct nvme_discovery_head {
    uint64_t genctr; /* changes with the log: read the head again after the entries */
    uint64_t numrec;
    uint16_t recfmt; /* 0 */
    uint8_t reserved[1006];
} NVME_PACKED;
static_assert(sizeof(struct nvme_discovery_head) == 1024, "wire");

enum nvme_transport { NVME_TRANSPORT_TCP = 3 };
enum nvme_address_family { NVME_ADDRESS_IPV4 = 1, NVME_ADDRESS_IPV6 = 2 };
enum nvme_subsystem_type { NVME_SUBSYSTEM_REFERRAL = 1, NVME_SUBSYSTEM_NVM = 2, NVME_SUBSYSTEM_DISCOVERY = 3 };
struct nvme_discovery_entry {
    uint8_t trtype, adrfam, subtype, treq;
    uint16_t portid, cntlid, asqsz, eflags;
    uint8_t reserved[20];
    char trsvcid[32]; /* port; the texts are padded with spaces or zeros */
    uint8_t reserved64[192];
    char subnqn[NVME_NQN_SIZE];
    char traddr[256];
    uint8_t tsas[256]; /* [0]: 0: no TLS */
} NVME_PACKED;
static_assert(sizeof(struct nvme_discovery_entry) == 1024, "wire");

/* ---- I/O commands (NVM command set 3) ---- */

enum nvme_io_opcode {
    NVME_IO_FLUSH = 0x00,
    NVME_IO_WRITE = 0x01,
    NVME_IO_READ = 0x02,
    NVME_IO_WRITE_ZEROES = 0x08,
    NVME_IO_DATASET = 0x09,
    NVME_IO_RESERVATION_REGISTER = 0x0d,
    NVME_IO_RESERVATION_ACQUIRE = 0x11,
    NVME_IO_RESERVATION_RELEASE = 0x15
};
/* Read, Write, Write Zeroes: cdw10 and cdw11 = first block, cdw12 = blocks - 1 and flags, Write Zeroes: NVME_IO_DEALLOCATE.
 * Dataset Management: cdw10 = ranges - 1, cdw11 = NVME_DATASET_DEALLOCATE, data: the ranges. Flush: nsid alone. */
#define NVME_IO_FUA (1u << 30)
#define NVME_IO_DEALLOCATE (1u << 25)
#define NVME_DATASET_DEALLOCATE 4u
#define NVME_DATASET_RANGES_MAX 256
/* Reservations (base 2.0, 7.2 to 7.6): cdw10 = action | NVME_RESERVATION_ANY_KEY | type << 8. `other` is the new key, or the one to preempt;
 * Release has only the first. */
enum nvme_register_action { NVME_REGISTER_NEW = 0, NVME_REGISTER_END = 1, NVME_REGISTER_REPLACE = 2 };
enum nvme_acquire_action { NVME_ACQUIRE_NEW = 0, NVME_ACQUIRE_PREEMPT = 1 };
#define NVME_RESERVATION_ANY_KEY 8u
#define NVME_RESERVATION_WRITE_REGISTRANTS 3u /* reads for all, writes for registrants */
#define NVME_RESCAP_WRITE_REGISTRANTS 0x08u
struct nvme_reservation_keys {
    uint64_t current, other;
} NVME_PACKED;
static_assert(sizeof(struct nvme_reservation_keys) == 16, "wire");
struct nvme_range {
    uint32_t attributes;
    uint32_t block_count;
    uint64_t first_block;
} NVME_PACKED;
static_assert(sizeof(struct nvme_range) == 16, "wire");

#endif
