// Greedy longest match of bytes over a vocabulary, on a trie in two flat arrays that the caller owns and may share
// between threads: nothing is written to them after trie_build. The plain form, rwkv_spec/tokenizer/trie.py, gives
// the same ids.
//
// The trie is a double array. A node is a cell; its child along byte b is the cell number next / 2 + b, if that cell's
// `parent` is the node. So a step costs one load of eight bytes, and the whole World vocabulary (116 079 nodes) takes
// about a megabyte. The low bit of `next` says that a token ends at the node; its id lies in a second array, which is
// read once a token. Cell 0 is the root. Childless nodes have next / 2 = 0: the cells from there on are the root itself
// and its children, which name another parent.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace {

struct Cell {
    uint32_t next, parent;
};

constexpr uint32_t FREE = 0xffffffffu;
constexpr int64_t BYTES = 256;
// How many places are looked at for a node with several children before the array grows. The holes that this leaves
// are filled by nodes with one child, which are most.
constexpr int MOST_PROBES = 128;
enum Code { DONE = 0, FULL = 1, STUCK = 2, TOO_SMALL = 3, NO_MEMORY = 4 };

struct Tokens {
    const uint8_t* bytes;
    const int64_t* ends;
    const int32_t* ids;

    const uint8_t* begin(int64_t token) const { return bytes + (token == 0 ? 0 : ends[token - 1]); }
    int64_t length(int64_t token) const { return ends[token] - (token == 0 ? 0 : ends[token - 1]); }
    bool before(int64_t one, int64_t other) const {
        const int64_t shared = std::min(length(one), length(other));
        const int order = std::memcmp(begin(one), begin(other), static_cast<size_t>(shared));
        return order != 0 ? order < 0 : length(one) < length(other);
    }
};

// A node still to be filled: the tokens low ≤ i < high, in sorted order, go through it, `depth` bytes deep.
struct Node {
    uint32_t cell;
    int64_t low, high, depth;
};

struct Builder {
    Tokens tokens;
    Cell* cells;
    int32_t* id_of_cell;
    int64_t capacity;
    std::vector<int64_t> sorted;
    std::vector<Node> waiting;
    // Below first_free no cell is free; from `end` on all are.
    int64_t first_free = 1, end = 1;
    uint8_t child_bytes[BYTES];
    int64_t child_lows[BYTES + 1];

    // Fills child_bytes and child_lows, and says how many children there are.
    int children_of(const Node& node, int64_t low) {
        int count = 0;
        for (int64_t i = low; i < node.high; i++) {
            const uint8_t byte = tokens.begin(sorted[i])[node.depth];
            if (count > 0 && child_bytes[count - 1] == byte) continue;
            child_bytes[count] = byte;
            child_lows[count++] = i;
        }
        child_lows[count] = node.high;
        return count;
    }

    bool fits(int64_t base, int count) const {
        for (int i = 0; i < count; i++)
            if (cells[base + child_bytes[i]].parent != FREE) return false;
        return true;
    }

    // A base whose cells for these children are free and inside the array; -1 where the array is too small. Bases are
    // at least 1: with 0 a child could be the root.
    int64_t place(int count) {
        while (first_free < end && cells[first_free].parent != FREE) first_free++;
        int probes = 0;
        for (int64_t cell = first_free; cell < end && probes < MOST_PROBES; cell++) {
            if (cells[cell].parent != FREE) continue;
            probes++;
            const int64_t base = cell - child_bytes[0];
            if (base >= 1 && base + BYTES <= capacity && fits(base, count)) return base;
        }
        const int64_t base = std::max<int64_t>(end - child_bytes[0], 1);
        return base + BYTES <= capacity ? base : -1;
    }

    bool fill(const Node& node) {
        int64_t low = node.low;
        uint32_t token_ends = 0;
        if (low < node.high && tokens.length(sorted[low]) == node.depth) {
            id_of_cell[node.cell] = tokens.ids[sorted[low++]];
            token_ends = 1;
        }
        const int count = children_of(node, low);
        if (count == 0) {
            cells[node.cell].next = token_ends;
            return true;
        }
        const int64_t base = place(count);
        if (base < 0) return false;
        cells[node.cell].next = static_cast<uint32_t>(base) * 2 | token_ends;
        for (int i = 0; i < count; i++) {
            const uint32_t cell = static_cast<uint32_t>(base + child_bytes[i]);
            cells[cell] = {0, node.cell};
            end = std::max<int64_t>(end, cell + 1);
            waiting.push_back({cell, child_lows[i], child_lows[i + 1], node.depth + 1});
        }
        return true;
    }
};

}  // namespace

// Token i is the bytes ends[i - 1] to ends[i]; tokens differ and none is empty. `cells` and `id_of_cell` have room for
// `capacity` ≤ 2^30 cells. DONE, with how many of them are in use, all that a walk may touch; or TOO_SMALL, NO_MEMORY.
extern "C" int trie_build(const uint8_t* bytes, const int64_t* ends, const int32_t* ids, int64_t num_tokens,
                          int64_t capacity, Cell* cells, int32_t* id_of_cell, int64_t* used) {
    if (capacity < 1 + BYTES) return TOO_SMALL;
    try {
        Builder builder;
        builder.tokens = {bytes, ends, ids};
        builder.cells = cells;
        builder.id_of_cell = id_of_cell;
        builder.capacity = capacity;
        for (int64_t token = 0; token < num_tokens; token++) builder.sorted.push_back(token);
        std::sort(builder.sorted.begin(), builder.sorted.end(),
                  [&](int64_t one, int64_t other) { return builder.tokens.before(one, other); });
        for (int64_t cell = 0; cell < capacity; cell++) cells[cell] = {0, FREE}, id_of_cell[cell] = -1;
        builder.waiting.push_back({0, 0, num_tokens, 0});
        // By depth: the nodes that every walk begins with lie together.
        for (size_t i = 0; i < builder.waiting.size(); i++)
            if (!builder.fill(Node(builder.waiting[i]))) return TOO_SMALL;
        // A walk looks at up to 255 cells behind a base, and bases are smaller than `end`.
        *used = std::min(builder.end + BYTES, capacity);
        return DONE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

// Goes on at place[0] = document, place[1] = byte in it, and leaves there where it stopped. ids has room for `room` ids;
// `written` says how many came; counts[document], set to 0 by the caller, grows by those of each document. DONE;
// FULL, where a further call goes on; or STUCK, where no token begins at the place.
extern "C" int trie_encode(const Cell* cells, const int32_t* id_of_cell, const uint8_t* const* documents,
                           const int64_t* sizes, int64_t num_documents, int64_t room, int64_t* ids, int64_t* counts,
                           int64_t* place, int64_t* written) {
    const uint32_t root = cells[0].next >> 1;
    int64_t count = 0, document = place[0], at = place[1];
    Code code = DONE;
    for (; document < num_documents; document++, at = 0) {
        const uint8_t* const data = documents[document];
        const int64_t size = sizes[document], before = count;
        while (at < size) {
            if (count == room) {
                code = FULL;
                break;
            }
            uint32_t node = 0, base = root, found = 0;
            int64_t found_end = at;
            for (int64_t i = at; i < size;) {
                const uint32_t child = base + data[i++];
                const Cell cell = cells[child];
                if (cell.parent != node) break;
                node = child;
                base = cell.next >> 1;
                if (cell.next & 1) {
                    found = child;
                    found_end = i;
                }
            }
            if (found == 0) {
                code = STUCK;
                break;
            }
            ids[count++] = id_of_cell[found];
            at = found_end;
        }
        counts[document] += count - before;
        if (code != DONE) break;
    }
    place[0] = document;
    place[1] = at;
    *written = count;
    return code;
}
