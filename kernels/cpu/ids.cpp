// Ids of many texts at once, where they lie in memory: of decimal integers, and of bytes. And documents as a store has
// them: each followed by id 0, in the store's own type.
//
// Texts are given by address and size. What is not plain is not judged here: UNUSUAL says that some text needs the
// exact way of rwkv_spec/tokenizer, which gives the same ids or says in words what is wrong, and where.

#include <cstdint>

namespace {

enum Code { DONE = 0, UNUSUAL = 1 };

// Eighteen digits always fit into 64 bits.
constexpr int64_t MOST_DIGITS = 18;

// The space, and tab, line feed, vertical tab, form feed and return.
inline bool is_space(uint8_t byte) { return byte == ' ' || (byte >= 9 && byte <= 13); }

// The ids of one text behind `ids`, and how many; -1 where it is unusual. A list has commas between its integers.
template <bool LIST>
int64_t read_integers(const uint8_t* at, const uint8_t* end, uint64_t high, int64_t shift, int64_t* ids) {
    int64_t count = 0;
    while (at < end) {
        uint32_t digit = *at - uint32_t{'0'};
        if (digit > 9) {
            if (!is_space(*at) && !(LIST && *at == ',')) return -1;
            at++;
            continue;
        }
        const uint8_t* const first = at;
        uint64_t value = digit;
        while (++at < end && (digit = *at - uint32_t{'0'}) <= 9) value = value * 10 + digit;
        if (at - first > MOST_DIGITS || value > high) return -1;
        ids[count++] = static_cast<int64_t>(value) + shift;
    }
    return count;
}

template <class Stored>
void end_all(const int64_t* ids, const int64_t* sizes, int64_t num_documents, Stored* out) {
    for (int64_t document = 0; document < num_documents; document++) {
        for (int64_t i = 0; i < sizes[document]; i++) out[i] = static_cast<Stored>(ids[i]);
        ids += sizes[document];
        out += sizes[document];
        *out++ = 0;
    }
}

}  // namespace

// Integers 0..high, separated by white space, become ids that are `shift` higher. `ids` has room for one id for every
// two bytes and one more of each text; counts[text] says how many each has.
extern "C" int ids_of_integers(const uint8_t* const* texts, const int64_t* sizes, const uint8_t* is_list,
                               int64_t num_texts, int64_t high, int64_t shift, int64_t* ids, int64_t* counts) {
    for (int64_t text = 0; text < num_texts; text++) {
        const uint8_t *const begin = texts[text], *const end = begin + sizes[text];
        const uint64_t top = static_cast<uint64_t>(high);
        const int64_t count = is_list[text] ? read_integers<true>(begin, end, top, shift, ids)
                                            : read_integers<false>(begin, end, top, shift, ids);
        if (count < 0) return UNUSUAL;
        counts[text] = count;
        ids += count;
    }
    return DONE;
}

// Byte b is id b + 1. `ids` has room for one id a byte.
extern "C" int ids_of_bytes(const uint8_t* const* texts, const int64_t* sizes, int64_t num_texts, int64_t* ids) {
    for (int64_t text = 0; text < num_texts; text++)
        for (int64_t i = 0; i < sizes[text]; i++) *ids++ = texts[text][i] + 1;
    return DONE;
}

// Documents that lie back to back, to `out`, of integers of `item_size` 2 or 4 bytes, each followed by 0.
extern "C" int ids_end(const int64_t* ids, const int64_t* sizes, int64_t num_documents, int64_t item_size, void* out) {
    if (item_size == 2)
        end_all(ids, sizes, num_documents, static_cast<uint16_t*>(out));
    else
        end_all(ids, sizes, num_documents, static_cast<int32_t*>(out));
    return DONE;
}
