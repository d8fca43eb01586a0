// Runs the instructions of Intel's AMX on a processor that has none: each raises SIGILL, is read from the program's own code and
// done here, as Intel's manual has it. What a real processor would refuse ends the program. Linked into native_bits.cpp.

#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace {

bool permitted = false;  // the system has been asked for tile registers

struct Tiles {
    bool configured = false;
    int rows[8] = {}, row_bytes[8] = {};
    uint8_t bytes[8][16][64] = {};
};

Tiles& tiles() {
    static thread_local Tiles found;
    return found;
}

[[noreturn]] void refuse(const char* why) {
    const char* const parts[] = {"amx_traps: ", why, "\n"};
    for (const char* part : parts)
        if (write(2, part, std::strlen(part)) < 0) break;
    std::_Exit(70);
}

void demand(bool fine, const char* why) {
    if (!fine) refuse(why);
}

enum Prefix { NONE, P66, PF3, PF2 };

struct Instruction {
    int opcode, prefix, vvvv, mod, reg, rm;
    uint8_t* base = nullptr;  // of its operand in memory, without the index
    int64_t index = 0;        // of that operand, scaled: a tile's rows are so many bytes apart
    int length;
};

constexpr int REGISTERS[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                             REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

Instruction decode(const greg_t* registers) {
    const auto* const code = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
    demand(code[0] == 0xc4 && (code[1] & 31) == 2 && !(code[2] & 0x84), "not one of AMX's instructions");
    const int more_index = code[1] & 64 ? 0 : 8, more_base = code[1] & 32 ? 0 : 8;
    Instruction found{};
    found.opcode = code[3], found.prefix = code[2] & 3, found.vvvv = ~(code[2] >> 3) & 15;
    found.mod = code[4] >> 6, found.reg = code[4] >> 3 & 7, found.rm = code[4] & 7, found.length = 5;
    if (found.mod == 3) return found;
    int64_t at = 0;
    int base = found.rm;
    if (found.rm == 4) {
        const int sib = code[found.length++], index = (sib >> 3 & 7) + more_index;
        base = sib & 7;
        if (index != 4) found.index = registers[REGISTERS[index]] << (sib >> 6);
    }
    const bool bare = base == 5 && found.mod == 0;
    if (!bare) at = registers[REGISTERS[base + more_base]];
    if (found.mod == 1) at += static_cast<int8_t>(code[found.length++]);
    if (found.mod == 2 || bare) {
        int32_t offset;
        std::memcpy(&offset, code + found.length, 4);
        found.length += 4, at += offset;
    }
    if (bare && found.rm == 5) at += registers[REG_RIP] + found.length;
    found.base = reinterpret_cast<uint8_t*>(at);
    return found;
}

void configure(const uint8_t* from) {
    demand(permitted, "no permission was asked for");
    demand(from[0] == 1 && from[1] == 0, "palette 1 from row 0 is all there is");
    for (int i = 2; i < 64; i++)
        demand(!from[i] || (i >= 16 && i < 32) || (i >= 48 && i < 56), "there are 8 registers, and the other bytes are reserved");
    Tiles& all = tiles();
    all = {};
    for (int i = 0; i < 8; i++) {
        uint16_t row_bytes;
        std::memcpy(&row_bytes, from + 16 + 2 * i, 2);
        all.row_bytes[i] = row_bytes, all.rows[i] = from[48 + i];
        demand(row_bytes <= 64 && all.rows[i] <= 16, "a register is 16 rows of 64 bytes");
    }
    all.configured = true;
}

float upper(const uint8_t* at) {  // a bfloat16
    uint32_t bits = static_cast<uint32_t>(at[0] | at[1] << 8) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// c += a b, where c[m][n] gains what the two numbers in a[m][k] and b[k][n] give for each k.
void multiply(const Instruction& what) {
    Tiles& all = tiles();
    const int c = what.reg, a = what.rm, b = what.vvvv;
    demand(b < 8 && a != b && a != c && b != c, "three different registers");
    demand(all.row_bytes[a] / 4 == all.rows[b] && all.rows[a] == all.rows[c] && all.row_bytes[b] == all.row_bytes[c], "sizes that do not fit");
    for (int m = 0; m < all.rows[c]; m++)
        for (int n = 0; n < all.row_bytes[c] / 4; n++) {
            uint8_t* const to = all.bytes[c][m] + 4 * n;
            float even = 0, odd = 0, brains;
            std::memcpy(&brains, to, 4);
            for (int k = 0; k < all.rows[b]; k++) {
                const uint8_t *const of_row = all.bytes[a][m] + 4 * k, *const of_column = all.bytes[b][k] + 4 * n;
                even += upper(of_row) * upper(of_column), odd += upper(of_row + 2) * upper(of_column + 2);
            }
            brains += even + odd;
            std::memcpy(to, &brains, 4);
        }
}

void run(const Instruction& what) {
    Tiles& all = tiles();
    const bool memory = what.mod != 3;
    if (what.opcode == 0x49 && what.prefix == NONE && what.reg == 0 && memory) return configure(what.base + what.index);
    demand(all.configured, "the registers are not configured");
    if (what.opcode == 0x49 && what.prefix == NONE && !memory) {
        std::memset(&all, 0x7f, sizeof all);
        all.configured = false;
    } else if (what.opcode == 0x49 && what.prefix == PF2 && !memory) {
        std::memset(all.bytes[what.reg], 0, sizeof all.bytes[0]);
    } else if (what.opcode == 0x4b && what.prefix == PF2 && memory && what.rm == 4) {
        std::memset(all.bytes[what.reg], 0, sizeof all.bytes[0]);
        for (int m = 0; m < all.rows[what.reg]; m++)
            std::memcpy(all.bytes[what.reg][m], what.base + m * what.index, static_cast<size_t>(all.row_bytes[what.reg]));
    } else if (what.opcode == 0x4b && what.prefix == PF3 && memory && what.rm == 4) {
        for (int m = 0; m < all.rows[what.reg]; m++)
            std::memcpy(what.base + m * what.index, all.bytes[what.reg][m], static_cast<size_t>(all.row_bytes[what.reg]));
    } else if (!memory && what.opcode == 0x5c && what.prefix == PF3) {
        multiply(what);
    } else {
        refuse("an instruction that is not known here");
    }
}

void trapped(int, siginfo_t*, void* context) {
    greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const Instruction what = decode(registers);
    run(what);
    registers[REG_RIP] += what.length;
}

struct Installed {
    Installed() {
        struct sigaction action = {};
        action.sa_sigaction = trapped;
        action.sa_flags = SA_SIGINFO;
        sigaction(SIGILL, &action, nullptr);
    }
} installed;

}  // namespace

// The kernels ask the system for permission, which it has none to give; all else is passed on.
extern "C" long syscall(long number, ...) noexcept {
    long values[6];
    va_list list;
    va_start(list, number);
    for (long& value : values) value = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && values[0] == 0x1023 && values[1] == 18) {
        permitted = true;
        return 0;
    }
    register long fourth asm("r10") = values[3];
    register long fifth asm("r8") = values[4];
    register long sixth asm("r9") = values[5];
    long result;
    asm volatile("syscall"
                 : "=a"(result)
                 : "a"(number), "D"(values[0]), "S"(values[1]), "d"(values[2]), "r"(fourth), "r"(fifth), "r"(sixth)
                 : "rcx", "r11", "memory");
    if (result >= 0 || result < -4095) return result;
    errno = static_cast<int>(-result);
    return -1;
}
