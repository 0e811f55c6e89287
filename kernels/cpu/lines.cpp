// Finds the documents of a block of whole lines: in .txt each line, in .jsonl the text or the list of integers that one
// field of each line's object holds.
//
// Only what is plain is read here, and all that is read is checked: UTF-8 and JSON in the strict sense, no name twice
// in an object. A block with any other line is UNUSUAL as a whole, and rwkv_spec/data/rows.py reads it, which knows
// every case and says in words what is wrong. Unusual are faults, and a few rarities: names with escapes, halves of
// surrogate pairs, deep nesting, hundreds of names, integers of thousands of digits.

#include <cstdint>
#include <cstring>

namespace {

enum Code { DONE = 0, UNUSUAL = 1 };

constexpr int MOST_DEPTH = 64;
constexpr int MOST_NAMES = 256;
// Python refuses to read integers of more than 4300.
constexpr int64_t MOST_DIGITS = 4000;

// White space of JSON; of a blank line it may also be 11 and 12.
inline bool is_space(uint8_t byte) { return byte == ' ' || byte == '\t' || byte == '\n' || byte == '\r'; }

inline bool is_digit(uint8_t byte) { return byte >= '0' && byte <= '9'; }

// A number whose lowest set bit lies in the first of eight bytes that ends a run of plain ASCII in a string: a control
// character, a quote, a backslash, or a byte of 128 or more; 0 where there is none.
inline uint64_t first_special(const uint8_t* at) {
    constexpr uint64_t ONES = 0x0101010101010101u, HIGHS = 0x8080808080808080u;
    uint64_t word;
    std::memcpy(&word, at, 8);
    const uint64_t quote = word ^ (ONES * '"'), backslash = word ^ (ONES * '\\');
    const uint64_t control = (word - ONES * 0x20) & ~word;
    return (control | ((quote - ONES) & ~quote) | ((backslash - ONES) & ~backslash) | word) & HIGHS;
}

// The first special byte, or the end.
inline const uint8_t* skip_ascii(const uint8_t* at, const uint8_t* end) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    while (end - at >= 8) {
        const uint64_t special = first_special(at);
        if (special != 0) return at + (__builtin_ctzll(special) >> 3);
        at += 8;
    }
#endif
    while (at < end && *at >= 0x20 && *at < 0x80 && *at != '"' && *at != '\\') at++;
    return at;
}

// How many bytes the character of several bytes takes that begins here; 0 where this is no UTF-8.
inline int64_t character(const uint8_t* at, const uint8_t* end) {
    const int64_t room = end - at;
    const auto follows = [&](int64_t i, uint8_t low = 0x80, uint8_t high = 0xbf) {
        return i < room && at[i] >= low && at[i] <= high;
    };
    const uint8_t lead = at[0];
    // Not the longer forms of shorter characters, no halves of surrogate pairs, nothing above U+10FFFF.
    if (lead >= 0xc2 && lead <= 0xdf) return follows(1) ? 2 : 0;
    if (lead >= 0xe0 && lead <= 0xef)
        return follows(1, lead == 0xe0 ? 0xa0 : 0x80, lead == 0xed ? 0x9f : 0xbf) && follows(2) ? 3 : 0;
    if (lead >= 0xf0 && lead <= 0xf4)
        return follows(1, lead == 0xf0 ? 0x90 : 0x80, lead == 0xf4 ? 0x8f : 0xbf) && follows(2) && follows(3) ? 4 : 0;
    return 0;
}

bool is_utf8(const uint8_t* at, const uint8_t* end) {
    while ((at = skip_ascii(at, end)) < end) {
        const int64_t size = *at < 0x80 ? 1 : character(at, end);
        if (size == 0) return false;
        at += size;
    }
    return true;
}

// The number of four hexadecimal digits; -1 where they are none.
inline int32_t hexadecimal(const uint8_t* at, const uint8_t* end) {
    if (end - at < 4) return -1;
    int32_t number = 0;
    for (int i = 0; i < 4; i++) {
        const uint8_t byte = at[i], letter = byte | 0x20;
        if (!is_digit(byte) && (letter < 'a' || letter > 'f')) return -1;
        number = number * 16 + (is_digit(byte) ? byte - '0' : letter - 'a' + 10);
    }
    return number;
}

// The character of an escape that begins at its backslash, and how many bytes the escape takes; 0 where it is none, or
// half of a surrogate pair.
inline int64_t escape(const uint8_t* at, const uint8_t* end, uint32_t* found) {
    static const char LETTERS[] = "\"\\/bfnrt", MEANINGS[] = "\"\\/\b\f\n\r\t";
    if (end - at < 2) return 0;
    if (at[1] != 'u') {
        const char* const letter = at[1] == 0 ? nullptr : std::strchr(LETTERS, at[1]);
        if (letter == nullptr) return 0;
        *found = static_cast<uint8_t>(MEANINGS[letter - LETTERS]);
        return 2;
    }
    const int32_t number = hexadecimal(at + 2, end);
    if (number < 0 || (number >= 0xdc00 && number <= 0xdfff)) return 0;
    *found = static_cast<uint32_t>(number);
    if (number < 0xd800 || number > 0xdfff) return 6;
    if (end - at < 12 || at[6] != '\\' || at[7] != 'u') return 0;
    const int32_t low = hexadecimal(at + 8, end);
    if (low < 0xdc00 || low > 0xdfff) return 0;
    *found = static_cast<uint32_t>(0x10000 + ((number - 0xd800) << 10) + (low - 0xdc00));
    return 12;
}

inline uint8_t* write_utf8(uint32_t found, uint8_t* out) {
    if (found < 0x80) {
        *out++ = static_cast<uint8_t>(found);
        return out;
    }
    const int more = found < 0x800 ? 1 : found < 0x10000 ? 2 : 3;
    *out++ = static_cast<uint8_t>((0xf0 << (3 - more)) | (found >> (6 * more)));
    for (int i = more - 1; i >= 0; i--) *out++ = static_cast<uint8_t>(0x80 | ((found >> (6 * i)) & 0x3f));
    return out;
}

// What stands between the quotes of a string that was checked, without its escapes; never longer than with them.
uint8_t* unescape(const uint8_t* at, const uint8_t* end, uint8_t* out) {
    while (at < end) {
        const void* const next = std::memchr(at, '\\', static_cast<size_t>(end - at));
        const uint8_t* const stop = next == nullptr ? end : static_cast<const uint8_t*>(next);
        std::memcpy(out, at, static_cast<size_t>(stop - at));
        out += stop - at;
        at = stop;
        if (at < end) {
            uint32_t found = 0;
            at += escape(at, end, &found);
            out = write_utf8(found, out);
        }
    }
    return out;
}

struct Span {
    const uint8_t* begin;
    int64_t size;

    bool operator==(const Span& other) const {
        return size == other.size && std::memcmp(begin, other.begin, static_cast<size_t>(size)) == 0;
    }
};

// A strict reader of JSON. Each function reads from `at`, and says whether what it found is whole and plain.
struct Reader {
    const uint8_t *at, *end;
    // Names of the objects that are open, the innermost one's last.
    Span names[MOST_NAMES];
    int num_names = 0;

    bool skip(uint8_t byte) {
        if (at >= end || *at != byte) return false;
        at++;
        return true;
    }
    void skip_space() {
        while (at < end && is_space(*at)) at++;
    }

    bool string(Span* inside, bool* escaped) {
        if (!skip('"')) return false;
        const uint8_t* const begin = at;
        *escaped = false;
        for (;;) {
            at = skip_ascii(at, end);
            if (at >= end || *at < 0x20) return false;
            if (*at == '"') break;
            uint32_t found;
            const int64_t size = *at == '\\' ? escape(at, end, &found) : character(at, end);
            if (size == 0) return false;
            *escaped |= *at == '\\';
            at += size;
        }
        *inside = {begin, at++ - begin};
        return true;
    }

    bool digits() {
        const uint8_t* const begin = at;
        while (at < end && is_digit(*at)) at++;
        return at > begin && at - begin <= MOST_DIGITS;
    }
    bool whole_number() { return at < end && *at == '0' ? (at++, true) : digits(); }
    bool number() {
        skip('-');
        if (!whole_number() || (skip('.') && !digits())) return false;
        if (!skip('e') && !skip('E')) return true;
        if (!skip('+')) skip('-');
        return digits();
    }
    bool word(const char* text) {
        for (; *text != 0; text++)
            if (!skip(static_cast<uint8_t>(*text))) return false;
        return true;
    }

    // A name that the object has not had yet, whose first name is names[first], and the colon.
    bool name(int first) {
        Span found;
        bool escaped;
        if (num_names == MOST_NAMES || !string(&found, &escaped) || escaped) return false;
        for (int i = first; i < num_names; i++)
            if (names[i] == found) return false;
        names[num_names++] = found;
        skip_space();
        if (!skip(':')) return false;
        skip_space();
        return true;
    }

    // What is inside an object or a list, from behind its opening bracket; `one` reads a member.
    template <class One>
    bool members(uint8_t closing, One one) {
        skip_space();
        if (skip(closing)) return true;
        do {
            skip_space();
            if (!one()) return false;
            skip_space();
        } while (skip(','));
        return skip(closing);
    }

    bool value(int depth) {
        if (at >= end || depth == MOST_DEPTH) return false;
        Span inside;
        bool escaped;
        switch (*at) {
            case '"': return string(&inside, &escaped);
            case 't': return word("true");
            case 'f': return word("false");
            case 'n': return word("null");
            case '[': at++; return members(']', [&] { return value(depth + 1); });
            case '{': {
                const int first = num_names;
                at++;
                const bool plain = members('}', [&] { return name(first) && value(depth + 1); });
                num_names = first;
                return plain;
            }
            default: return number();
        }
    }
};

// What a block's documents are, one entry each. `names` are the field and then those whose values are asked for.
struct Found {
    const Span* names;
    int64_t num_names;
    uint8_t* arena;
    const uint8_t** texts;
    int64_t* sizes;
    uint8_t* is_list;
    const uint8_t** values;
    int64_t* value_sizes;
    int64_t count = 0;

    void add(const uint8_t* begin, int64_t size, bool list) {
        texts[count] = begin;
        sizes[count] = size;
        is_list[count] = list;
    }
};

bool read_text(Reader* reader, Found* found) {
    Span inside;
    bool escaped;
    if (!reader->string(&inside, &escaped)) return false;
    if (!escaped) {
        found->add(inside.begin, inside.size, false);
        return true;
    }
    uint8_t* const stop = unescape(inside.begin, inside.begin + inside.size, found->arena);
    found->add(found->arena, stop - found->arena, false);
    found->arena = stop;
    return true;
}

bool read_list(Reader* reader, Found* found) {
    const uint8_t* const begin = ++reader->at;
    if (!reader->members(']', [&] { return reader->whole_number(); })) return false;
    found->add(begin, reader->at - 1 - begin, true);
    return true;
}

bool read_object(const uint8_t* begin, const uint8_t* end, Found* found) {
    Reader reader;
    reader.at = begin;
    reader.end = end;
    int64_t missing = found->num_names;
    reader.skip_space();
    if (!reader.skip('{')) return false;
    const bool plain = reader.members('}', [&] {
        if (!reader.name(0)) return false;
        const Span name = reader.names[reader.num_names - 1];
        const uint8_t* const value = reader.at;
        const bool is_field = name == found->names[0];
        missing -= is_field;
        if (!is_field && !reader.value(1)) return false;
        if (is_field && !(value < end && *value == '[' ? read_list(&reader, found) : read_text(&reader, found)))
            return false;
        for (int64_t i = 1; i < found->num_names; i++) {
            if (!(name == found->names[i])) continue;
            const int64_t entry = found->count * (found->num_names - 1) + i - 1;
            found->values[entry] = value;
            found->value_sizes[entry] = reader.at - value;
            missing--;
        }
        return true;
    });
    reader.skip_space();
    return plain && reader.at == end && missing == 0;
}

bool read_line(const uint8_t* begin, const uint8_t* end, bool is_jsonl, Found* found) {
    if (is_jsonl) return read_object(begin, end, found);
    // One return before the line feed belongs to the line's end.
    const uint8_t* const stop = end[-1] == '\r' ? end - 1 : end;
    found->add(begin, stop - begin, false);
    return is_utf8(begin, stop);
}

bool is_blank(const uint8_t* at, const uint8_t* end) {
    while (at < end && (is_space(*at) || *at == 11 || *at == 12)) at++;
    return at == end;
}

}  // namespace

// `name_text` holds num_names names back to back, each up to name_ends[i]. `arena` has room for `size` bytes, the other
// arrays for as many documents as there are lines; of `values`, which are JSON as it stands, each document has
// num_names - 1. counts: documents, lines, blank lines, and the number of the first blank one, from 1.
extern "C" int lines_read(const uint8_t* block, int64_t size, int is_jsonl, const uint8_t* name_text,
                          const int64_t* name_ends, int64_t num_names, uint8_t* arena, const uint8_t** texts,
                          int64_t* sizes, uint8_t* is_list, const uint8_t** values, int64_t* value_sizes,
                          int64_t* counts) {
    if (num_names > MOST_NAMES) return UNUSUAL;
    Span names[MOST_NAMES];
    for (int64_t i = 0, start = 0; i < num_names; start = name_ends[i++])
        names[i] = {name_text + start, name_ends[i] - start};
    Found found{names, num_names, arena, texts, sizes, is_list, values, value_sizes};
    int64_t lines = 0, blank = 0, first_blank = 0;
    const uint8_t *at = block, *const end = block + size;
    while (at < end) {
        const void* const feed = std::memchr(at, '\n', static_cast<size_t>(end - at));
        const uint8_t* const stop = feed == nullptr ? end : static_cast<const uint8_t*>(feed);
        lines++;
        if (is_blank(at, stop)) {
            if (blank++ == 0) first_blank = lines;
        } else {
            if (!read_line(at, stop, is_jsonl != 0, &found)) return UNUSUAL;
            found.count++;
        }
        at = stop + 1;
    }
    counts[0] = found.count;
    counts[1] = lines;
    counts[2] = blank;
    counts[3] = first_blank;
    return DONE;
}
