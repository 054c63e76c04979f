/* clients.cpp - two clients train one agent, with 1 and 3 threads, and stay equal bit for bit, in C++11.

       c++ -std=c++11 -O2 -pthread -o clients docs/examples/clients.cpp && ./clients

   In the middle the second client loses its memory and loads what the first one saved. Exit status 1 if a hash
   differs. lockstep.c is a whole game. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

static void check(kopt_result result) {
    if (result != KOPT_OK) throw std::runtime_error(kopt_result_string(result));
}

class Agent {
    kopt_optimizer opt = kopt_adamw(1e-2);
    std::vector<std::vector<kopt_bf16>> weight, grad;
    std::vector<std::vector<unsigned char>> state;
    std::vector<kopt_tensor> list; // of pointers to the vectors above: an Agent must not be copied

  public:
    Agent(const Agent &) = delete;
    explicit Agent(const std::vector<size_t> &sizes) {
        for (size_t n : sizes) {
            weight.emplace_back(n), grad.emplace_back(n);
            kopt_tensor t = KOPT_TENSOR(KOPT_BF16, weight.back().data(), grad.back().data(), n, nullptr, 0);
            state.emplace_back(t.state_size = kopt_state_size(&opt, &t));
            t.state = state.back().data();
            list.push_back(t);
        }
        check(kopt_list_set_ids(list.data(), list.size(), 0));
        check(kopt_state_init(&opt, list.data(), list.size(), nullptr));
    }
    void train(size_t threads) {
        for (size_t k = 0; k < list.size(); k++) // the slope of (w - goal)^2 / 2
            for (size_t i = 0; i < grad[k].size(); i++)
                grad[k][i] = kopt_bf16_from_f32(kopt_f32_from_bf16(weight[k][i]) - float(i % 17) / 16);
        kopt_step step;
        check(kopt_step_begin(&step, &opt));
        const size_t n = kopt_list_length(list.data(), list.size());
        std::vector<kopt_result> results(threads);
        std::vector<std::thread> pool;
        for (size_t k = 0; k < threads; k++) // equal ranges, whatever tensors they cut
            pool.emplace_back([&, k] {
                results[k] = kopt_step_range(&step, list.data(), list.size(), n * k / threads, n * (k + 1) / threads);
            });
        for (std::thread &t : pool) t.join();
        for (kopt_result result : results) check(result);
    }
    std::vector<unsigned char> save() const {
        std::vector<unsigned char> bytes(kopt_save_size(&opt, list.data(), list.size()));
        check(kopt_save(&opt, list.data(), list.size(), bytes.data(), bytes.size()));
        return bytes;
    }
    void load(const std::vector<unsigned char> &bytes) {
        check(kopt_load(&opt, list.data(), list.size(), bytes.data(), bytes.size()));
    }
    unsigned long long hash() const { // FNV-1a of all that it remembers
        unsigned long long h = 0xCBF29CE484222325u;
        for (unsigned char byte : save()) h = (h ^ byte) * 0x100000001B3u;
        return h;
    }
};

int main() {
    const std::vector<size_t> sizes = {4096, 64, 10001, 3};
    Agent first(sizes);
    std::unique_ptr<Agent> second(new Agent(sizes));
    for (int i = 1; i <= 400; i++) {
        first.train(1), second->train(3);
        if (i == 200) second.reset(new Agent(sizes)), second->load(first.save());
        if (i % 100 != 0) continue;
        std::printf("step %d: %016llx with 1 thread, %016llx with 3\n", i, first.hash(), second->hash());
        if (first.hash() != second->hash()) return 1;
    }
    std::puts("the bits are the same");
}
