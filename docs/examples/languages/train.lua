-- train.lua - the header called from LuaJIT, by its FFI, which reads declarations in C.
local ffi = require "ffi"
ffi.cdef [[
typedef struct kopt_optimizer {
    uint32_t made_;
    int rule, rounding, residual_rounding, first_moment_format, second_moment_format, moment_rounding, decay_mode,
        nesterov, amsgrad, stable, maximize, zero_grad, moments_only, lookahead, atan2_outside;
    uint32_t step, reserved32_;
    double lr, max_lr, weight_decay, beta1, beta2, beta3, eps, momentum, dampening, grad_scale, clip, lookahead_rate,
        atan2_a, atan2_b, sharpness;
    uint64_t seed, reserved_[7];
} kopt_optimizer;
typedef struct kopt_tensor {
    void *weight, *grad, *copy, *state;
    size_t state_size, n;
    const void *arrays;
    void *counts;
    int weight_format, grad_format, copy_format;
    uint32_t id;
    int no_decay;
    uint32_t reserved32_;
    uint64_t first_index;
    double rate_scale, stable_scale;
    uint64_t reserved_[2];
} kopt_tensor;
int kopt_optimizer_init(kopt_optimizer *opt, int rule, double lr, int version, size_t opt_size, size_t tensor_size);
size_t kopt_state_size(const kopt_optimizer *opt, const kopt_tensor *t);
int kopt_state_init(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count, const float *weights);
int kopt_optimizer_step(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count);
const char *kopt_result_string(int result);
int64_t kopt_layout_of(const char *name);
]]
local k = ffi.load(arg[1] or "kahan_opt")
local VERSION, ADAMW, BF16 = 1500, 64, 1

local function check(result)
    if result ~= 0 then error(ffi.string(k.kopt_result_string(result))) end
end
for name, offset in pairs {["kopt_optimizer.weight_decay: double"] = ffi.offsetof("kopt_optimizer", "weight_decay"),
                           ["kopt_tensor.weight_format: kopt_format"] = ffi.offsetof("kopt_tensor", "weight_format")} do
    assert(k.kopt_layout_of(name) == offset, name .. " is elsewhere")
end

local n = 1000
local weight, grad = ffi.new("uint16_t[?]", n), ffi.new("uint16_t[?]", n)
for j = 0, n - 1 do grad[j] = 0x3F80 end -- 1 in bf16
local opt = ffi.new("kopt_optimizer")
check(k.kopt_optimizer_init(opt, ADAMW, 1e-3, VERSION, ffi.sizeof("kopt_optimizer"), ffi.sizeof("kopt_tensor")))
opt.weight_decay = 0.1
local t = ffi.new("kopt_tensor", {weight = weight, grad = grad, n = n, weight_format = BF16, grad_format = BF16})
t.state_size = k.kopt_state_size(opt, t)
local state = ffi.new("char[?]", t.state_size) -- a tensor does not keep its arrays alive: variables do
t.state = state
check(k.kopt_state_init(opt, t, 1, nil))
for _ = 1, 100 do check(k.kopt_optimizer_step(opt, t, 1)) end
print(("LuaJIT %04x %04x %04x"):format(weight[0], weight[1], weight[n - 1]))
