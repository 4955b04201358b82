// SPDX-License-Identifier: Apache-2.0
#include "fields.h"

#include <locale.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "log.h"
#include "text.h"

namespace spin::trt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

template <int64_t kLow, int64_t kHigh>
bool within(int64_t x) {
    return kLow <= x && x <= kHigh;
}

bool any(int64_t) {
    return true;
}

// One of the two members is set: `integer` with its test, or `real`, which is a fraction below 1.
struct Field {
    const char* name;
    int64_t Config::* integer;
    double Config::* real;
    bool (*fits)(int64_t);
    const char* allowed;
    bool required;
    unsigned nodes;
};

constexpr unsigned kAll = kIndexer | kPredictBlocks | kSparseIndexer | kObserve;
constexpr unsigned kSelecting = kIndexer | kPredictBlocks;
constexpr unsigned kScoring = kIndexer | kSparseIndexer;
constexpr unsigned kLearning = kIndexer | kObserve;

constexpr Field kFields[] = {
    {"ratio", &Config::ratio, nullptr, within<1, 1 << 20>, "1 .. 1048576", true,
     kSelecting | kObserve},
    {"slots", &Config::slots, nullptr, within<1, 1 << 21>, "1 .. 16384 * block_size", true, kAll},
    {"top_k", &Config::top_k, nullptr, within<1, 2048>, "1 .. 2048", true, kSelecting | kScoring},
    {"layer", &Config::layer, nullptr, within<0, 1023>, "0 .. 1023", true, kSelecting},
    {"block_size", &Config::block_size, nullptr,
     [](int64_t x) { return x == 16 || x == 32 || x == 64 || x == 128; }, "16, 32, 64, 128", false,
     kAll},
    {"page_slots", &Config::page_slots, nullptr, [](int64_t x) { return x == 32 || x == 64; },
     "32, 64", false, kSelecting | kScoring},
    {"sparsity_ppm", &Config::sparsity_ppm, nullptr, within<0, 999999>, "0 .. 999999", false,
     kSelecting},
    {"exploration_ppm", &Config::exploration_ppm, nullptr, within<0, 1000000>, "0 .. 1000000",
     false, kSelecting},
    {"seed", &Config::seed, nullptr, any, "64 bits", false, kSelecting},
    {"pooling", &Config::pooling, nullptr, within<0, 2>, "0, 1, 2", false, kSelecting},
    {"row0_mask", &Config::row0_mask, nullptr, within<0, 1>, "0, 1", false, kSelecting},
    {"ema_decay", nullptr, &Config::ema_decay, nullptr, "a number in [0, 1)", false, kLearning},
    {"row0_update", &Config::row0_update, nullptr, within<0, 1>, "0, 1", false, kLearning},
    {"exact", &Config::exact, nullptr, within<0, 1>, "0, 1", false, kScoring},
    {"aliased", &Config::aliased, nullptr, within<0, 1>, "0, 1", false, kLearning},
};
static_assert(sizeof(kFields) / sizeof(kFields[0]) == kMaxFields);

// This thread is in the C locale while one lives: in others numbers may have a decimal comma.
class CLocale {
public:
    CLocale() : previous_(uselocale(c_locale())) {}
    ~CLocale() { uselocale(previous_); }
    CLocale(const CLocale&) = delete;
    CLocale& operator=(const CLocale&) = delete;

private:
    static locale_t c_locale() {
        static const locale_t made = newlocale(LC_ALL_MASK, "C", locale_t());
        return made;
    }

    locale_t previous_;
};

// The whole of a text as one number.
template <typename Integer>
bool read_text(std::string_view text, Integer& number) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    return error == std::errc() && end == text.data() + text.size();
}

// std::from_chars has real numbers since GCC 11 only. strtod knows more than decimals, and needs a
// zero at the end.
bool read_text(std::string_view text, double& number) {
    char digits[128];
    if (text.empty() || text.size() >= sizeof(digits) || text.front() == '+' ||
        text.find_first_not_of("0123456789.eE+-") != std::string_view::npos) {
        return false;
    }
    digits[text.copy(digits, text.size())] = '\0';
    const CLocale locale;
    char* end = nullptr;
    errno = 0;
    number = std::strtod(digits, &end);
    const bool vanished = number == 0.0 && errno == ERANGE;
    return end == digits + text.size() && !vanished;
}

// A field's text without the zeros that may end it.
std::string_view text_of(const PluginField& given) {
    std::string_view text(static_cast<const char*>(given.data), static_cast<size_t>(given.length));
    while (!text.empty() && text.back() == '\0') {
        text.remove_suffix(1);
    }
    return text;
}

template <typename Number>
Number load(const PluginField& given) {
    Number number;
    std::memcpy(&number, given.data, sizeof(number));
    return number;
}

bool read_integer(const PluginField& given, int64_t& value) {
    uint64_t bits = 0;
    switch (given.type) {
        case PluginFieldType::kINT32:
            value = load<int32_t>(given);
            return true;
        case PluginFieldType::kINT64:
            value = load<int64_t>(given);
            return true;
        case PluginFieldType::kCHAR:
            // A seed has no sign, but its bits may have been taken for a signed number.
            if (read_text(text_of(given), value)) {
                return true;
            }
            if (!read_text(text_of(given), bits)) {
                return false;
            }
            value = static_cast<int64_t>(bits);
            return true;
        default:
            return false;
    }
}

// ONNX has 32 bits for what was written as a decimal and is computed with as a double: a shortest
// decimal of those bits is what was written.
bool read_float(float bits, double& value) {
    const CLocale locale;
    for (int precision = 1; precision <= 9; ++precision) {  // nine digits tell all floats apart
        char digits[32];
        std::snprintf(digits, sizeof(digits), "%.*g", precision, static_cast<double>(bits));
        if (std::strtof(digits, nullptr) == bits) {
            return read_text(digits, value);
        }
    }
    return false;  // NaN
}

bool read_real(const PluginField& given, double& value) {
    switch (given.type) {
        case PluginFieldType::kFLOAT64:
            value = load<double>(given);
            return true;
        case PluginFieldType::kFLOAT32:
            return read_float(load<float>(given), value);
        case PluginFieldType::kCHAR:
            return read_text(text_of(given), value);
        default:
            return false;
    }
}

// What was given, for a log line.
void show(const PluginField& given, char (&text)[48]) {
    const CLocale locale;
    double real = 0.0;
    int64_t integer = 0;
    const int type = static_cast<int>(given.type), length = static_cast<int>(given.length);
    if (given.data == nullptr) {
        std::snprintf(text, sizeof(text), "no data");
    } else if (given.type == PluginFieldType::kCHAR && length > 0) {
        std::snprintf(text, sizeof(text), "text '%.*s'", length < 24 ? length : 24,
                      static_cast<const char*>(given.data));
    } else if (length != 1) {
        std::snprintf(text, sizeof(text), "%d values", length);
    } else if (read_integer(given, integer)) {
        std::snprintf(text, sizeof(text), "%lld", static_cast<long long>(integer));
    } else if (read_real(given, real)) {
        std::snprintf(text, sizeof(text), "%.9g", real);
    } else {
        std::snprintf(text, sizeof(text), "field type %d", type);
    }
}

bool read_field(const Field& field, const PluginField& given, Config& config) {
    const bool text = given.type == PluginFieldType::kCHAR;
    if (given.data == nullptr || given.length < 1 || (given.length != 1 && !text)) {
        return false;
    }
    if (field.real != nullptr) {
        double& value = config.*field.real;
        return read_real(given, value) && 0.0 <= value && value < 1.0;  // refuses NaN, too
    }
    int64_t& value = config.*field.integer;
    return read_integer(given, value) && field.fits(value);
}

const Field* find_field(NodeBit node, const char* name) {
    for (const Field& field : kFields) {
        if ((field.nodes & node) != 0 && std::strcmp(field.name, name) == 0) {
            return &field;
        }
    }
    return nullptr;
}

bool refuse_field(const char* name, NodeBit node, const char* field) {
    Text known;
    for (const Field& other : kFields) {
        if ((other.nodes & node) != 0) {
            known.add(known.length > 0 ? ", %s" : "%s", other.name);
        }
    }
    return refuse("%s: field: got %.40s, allowed: %s", name, field, known.held);
}

}  // namespace

FieldList::FieldList(NodeBit node, const Config* config) noexcept {
    int count = 0;
    for (const Field& field : kFields) {
        if ((field.nodes & node) == 0) {
            continue;
        }
        const bool real = field.real != nullptr;
        const void* data = nullptr;
        if (config != nullptr) {
            data = real ? static_cast<const void*>(&(config->*field.real))
                        : static_cast<const void*>(&(config->*field.integer));
        }
        const auto type = real ? PluginFieldType::kFLOAT64 : PluginFieldType::kINT64;
        fields_[count++] = PluginField(field.name, data, type, 1);
    }
    collection_.nbFields = count;
    collection_.fields = fields_;
}

bool read_fields(const char* name, NodeBit node, const PluginFieldCollection* given,
                 Config& config) noexcept {
    bool seen[kMaxFields] = {};
    const int count = given != nullptr ? given->nbFields : 0;
    if (count < 0 || (count > 0 && given->fields == nullptr)) {
        return refuse("%s: fields: got %d without an array, allowed: a collection", name, count);
    }
    for (int i = 0; i < count; ++i) {
        const PluginField& entry = given->fields[i];
        const Field* field = entry.name != nullptr ? find_field(node, entry.name) : nullptr;
        if (field == nullptr) {
            return refuse_field(name, node, entry.name != nullptr ? entry.name : "no name");
        }
        char text[48];
        show(entry, text);
        if (seen[field - kFields]) {
            return refuse("%s: %s: got it twice, allowed: once", name, field->name);
        }
        seen[field - kFields] = true;
        if (!read_field(*field, entry, config)) {
            return refuse("%s: %s: got %s, allowed: %s", name, field->name, text, field->allowed);
        }
    }
    for (const Field& field : kFields) {
        if (field.required && (field.nodes & node) != 0 && !seen[&field - kFields]) {
            return refuse("%s: %s: got nothing, allowed: %s", name, field.name, field.allowed);
        }
    }
    if (config.blocks() > 16384) {
        return refuse("%s: slots: got %lld, allowed: 1 .. 16384 * block_size", name,
                      static_cast<long long>(config.slots));
    }
    return true;
}

}  // namespace spin::trt
