-- train.lua - the header called from LuaJIT, by its FFI.
local ffi = require "ffi"
ffi.cdef [[
typedef struct { char bytes[200] __attribute__((aligned(8))); } kopt_optimizer;
typedef struct { char bytes[96] __attribute__((aligned(8))); } kopt_tensor;
kopt_optimizer kopt_adamw(double lr);
kopt_tensor kopt_tensor_of(void *weight, void *grad, int format, size_t n, void *state, size_t state_size);
size_t kopt_state_size(const kopt_optimizer *opt, size_t n);
int kopt_state_init(const kopt_optimizer *opt, const kopt_tensor *t, const float *weights);
int kopt_optimizer_step(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count);
const char *kopt_result_string(int result);
int64_t kopt_layout_of(const char *name);
]]
local k = ffi.load(arg[1] or "kahan_opt")

for _, name in ipairs {"kopt_optimizer", "kopt_tensor"} do
    assert(k.kopt_layout_of("sizeof " .. name) == ffi.sizeof(name), name .. " has another size")
end
local function check(result)
    if result ~= 0 then error(ffi.string(k.kopt_result_string(result))) end
end

local n = 1000
local weight, grad = ffi.new("uint16_t[?]", n), ffi.new("uint16_t[?]", n)
for j = 0, n - 1 do grad[j] = 0x3F80 end -- 1 in bf16
local opt = k.kopt_adamw(1e-3)
ffi.cast("double *", opt.bytes + k.kopt_layout_of("kopt_optimizer.weight_decay: double"))[0] = 0.1
local size = k.kopt_state_size(opt, n)
local state = ffi.new("char[?]", size) -- a tensor does not keep its arrays alive: variables do
local t = k.kopt_tensor_of(weight, grad, 1, n, state, size)
check(k.kopt_state_init(opt, t, nil))
for _ = 1, 100 do check(k.kopt_optimizer_step(opt, t, 1)) end
print(("LuaJIT %04x %04x %04x"):format(weight[0], weight[1], weight[n - 1]))
