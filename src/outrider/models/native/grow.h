// Trees of a draft that grow where a head is confident: the nodes that drafters/eagle/tree.py keeps, in the same order.
// kernels.cpp includes this; head.h runs the head.
//
// A node under which nothing can be kept is not followed. That changes no tree: a child is less likely reached than its
// parent, so whatever would come below such a node ranks after the nodes that are kept.

// In double precision and then rounded: the same bits on every processor.
inline float logarithm_of(float x) { return static_cast<float>(std::log(static_cast<double>(x))); }
inline float exponential_of(float x) { return static_cast<float>(std::exp(static_cast<double>(x))); }

// How trees grow.
struct Growth {
    int64_t depth, width;  // of the deepest node; nodes that are followed at each depth, and offered under each
    float heat;            // the head's logits are divided by it
    float less;            // log-probability that a depth costs
    float stop, least;     // probabilities to be reached: below `stop` no node is followed, below `least` none is kept
};

// A row that repeats the token of the row before it only fills a tile: it counts for nothing.
void hide_repeats(float* logits, const int64_t* ids, int64_t size) {
    for (int64_t i = 1; i < size; i++)
        if (ids[i] == ids[i - 1]) logits[i] = -INFINITY;
}

// Places of the `count` largest of some logits, largest first, of equal ones the first; returns how many there are.
int64_t largest_places(const float* logits, int64_t size, int64_t count, int64_t* places) {
    constexpr int64_t PART = 64;  // logits that are looked at one by one only where one of them is large enough
    int64_t found = 0;
    for (int64_t begin = 0; begin < size; begin += PART) {
        const int64_t some = size - begin < PART ? size - begin : PART;
        if (found == count && !(largest(logits + begin, some) > logits[places[count - 1]])) continue;
        for (int64_t i = begin; i < begin + some; i++) {
            if (!(logits[i] > -INFINITY) || (found == count && !(logits[i] > logits[places[count - 1]]))) continue;
            int64_t rank = found < count ? found++ : count - 1;
            for (; rank > 0 && logits[i] > logits[places[rank - 1]]; rank--) places[rank] = places[rank - 1];
            places[rank] = i;
        }
    }
    return found;
}

// The likeliest places and the logarithms of their probabilities; returns how many, none where the numbers overflowed. The
// logits are overwritten.
int64_t offers(float* logits, int64_t size, float heat, int64_t count, int64_t* places, float* logarithms) {
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) store(logits + i, div(load(logits + i), all_lanes(heat)));
    for (; i < size; i++) logits[i] /= heat;
    const int64_t found = largest_places(logits, size, count, places);
    if (!found) return 0;
    const float most = logits[places[0]];
    for (int64_t n = 0; n < found; n++) logarithms[n] = logits[places[n]] - most;
    const float total = exponentials(logits, size, most);
    if (!std::isfinite(most) || !std::isfinite(total)) return 0;  // what is not a number has no place in an order
    const float below = logarithm_of(total);
    for (int64_t n = 0; n < found; n++) logarithms[n] -= below;
    return found;
}

struct Node {
    int64_t token, parent;  // -1: none
    float score;            // the logarithm of the probability to be reached
    int64_t row, place;     // where it was run: among the rows of its depth, and in the cache; -1: not run
};

// The tree of one sequence as it grows.
class Tree {
  public:
    std::vector<Node> nodes;        // all that were seen, one depth after the other
    std::vector<int64_t> followed;  // nodes of the newest depth under which some may be kept, likeliest first

    Tree(const Growth& growth, int64_t size) : growth_(growth), size_(size) {}

    void put(int64_t parent, int64_t token, float logarithm) {
        const float above = parent < 0 ? 0.0f : nodes[parent].score;
        nodes.push_back({token, parent, above + logarithm - growth_.less, -1, -1});
    }

    // Choose the nodes to be followed, of those that were put since this was last done.
    void choose() {
        followed = best(newest_, growth_.width);
        newest_ = static_cast<int64_t>(nodes.size());
        const float least = least_score();
        while (!followed.empty() && !(nodes[followed.back()].score > least)) followed.pop_back();
    }

    // The nodes that are kept, as they were put, so that parents come first; returns how many.
    int64_t collect(int64_t* tokens, int64_t* parents, float* chances) const {
        std::vector<int64_t> kept = best(0, size_), places(nodes.size(), -1);
        while (!kept.empty() && !(exponential_of(nodes[kept.back()].score) >= least_kept())) kept.pop_back();
        std::sort(kept.begin(), kept.end());
        for (size_t n = 0; n < kept.size(); n++) {
            const Node& node = nodes[kept[n]];
            places[kept[n]] = static_cast<int64_t>(n);
            tokens[n] = node.token;
            parents[n] = node.parent < 0 ? -1 : places[node.parent];
            const float chance = exponential_of(node.score - (node.parent < 0 ? 0.0f : nodes[node.parent].score));
            chances[n] = chance < 1.0f ? chance : 1.0f;
        }
        return static_cast<int64_t>(kept.size());
    }

  private:
    // The best nodes from `begin` on, best first, of equal ones the first.
    std::vector<int64_t> best(int64_t begin, int64_t count) const {
        std::vector<int64_t> order;
        for (int64_t n = begin; n < static_cast<int64_t>(nodes.size()); n++) order.push_back(n);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return nodes[a].score > nodes[b].score; });
        if (static_cast<int64_t>(order.size()) > count) order.resize(count);
        return order;
    }

    float least_kept() const { return std::max(growth_.least, 1e-6f); }

    // A node that does not have more than this has nothing below it that is kept.
    float least_score() const {
        const float stop = logarithm_of(std::max(growth_.stop, least_kept()));
        if (static_cast<int64_t>(nodes.size()) < size_) return stop;
        const float last = nodes[best(0, size_).back()].score;
        return last > stop ? last : stop;
    }

    Growth growth_;
    int64_t size_, newest_ = 0;
};
