// train.rs - the header called from Rust.
use std::ffi::{CStr, CString};
use std::mem::{offset_of, size_of, zeroed};
use std::os::raw::{c_char, c_int, c_void};

// The structs have no padding, so fields that are not used here may be arrays.
#[repr(C)]
struct Optimizer {
    made_to_reserved32: [u32; 18],
    lr: f64,
    max_lr: f64,
    weight_decay: f64,
    beta1_to_sharpness: [f64; 12],
    seed: u64,
    reserved: [u64; 7],
}
#[repr(C)]
struct Tensor { // zeros are the defaults
    weight: *mut u16,
    grad: *mut u16,
    copy: *mut c_void,
    state: *mut u8,
    state_size: usize,
    n: usize,
    arrays_and_counts: [*mut c_void; 2],
    weight_format: c_int,
    grad_format: c_int,
    copy_format_to_reserved32: [u32; 4],
    first_index: u64,
    rate_scale: f64,
    stable_scale: f64,
    reserved: [u64; 2],
}
const VERSION: c_int = 1500;
const ADAMW: c_int = 64;
const BF16: c_int = 1;

extern "C" {
    fn kopt_optimizer_init(opt: *mut Optimizer, rule: c_int, lr: f64, version: c_int, opt_size: usize,
        tensor_size: usize) -> c_int;
    fn kopt_state_size(opt: *const Optimizer, t: *const Tensor) -> usize;
    fn kopt_state_init(opt: *const Optimizer, tensors: *const Tensor, count: usize, weights: *const f32) -> c_int;
    fn kopt_optimizer_step(opt: *mut Optimizer, tensors: *const Tensor, count: usize) -> c_int;
    fn kopt_result_string(result: c_int) -> *const c_char;
    fn kopt_layout_of(name: *const c_char) -> i64;
}

fn check(result: c_int) {
    assert!(result == 0, "{}", unsafe { CStr::from_ptr(kopt_result_string(result)) }.to_string_lossy());
}
fn expect(name: &str, offset: usize) { // is the field where the library has it?
    assert_eq!(unsafe { kopt_layout_of(CString::new(name).unwrap().as_ptr()) }, offset as i64, "{}", name);
}

fn main() {
    expect("kopt_optimizer.weight_decay: double", offset_of!(Optimizer, weight_decay));
    expect("kopt_tensor.weight_format: kopt_format", offset_of!(Tensor, weight_format));
    let mut weight = vec![0u16; 1000];
    let mut grad = vec![0x3F80u16; 1000]; // 1 in bf16
    unsafe {
        let mut opt: Optimizer = zeroed();
        check(kopt_optimizer_init(&mut opt, ADAMW, 1e-3, VERSION, size_of::<Optimizer>(), size_of::<Tensor>()));
        opt.weight_decay = 0.1;
        let mut t: Tensor = zeroed();
        (t.weight, t.grad, t.n) = (weight.as_mut_ptr(), grad.as_mut_ptr(), weight.len());
        (t.weight_format, t.grad_format) = (BF16, BF16);
        let mut state = vec![0u8; kopt_state_size(&opt, &t)];
        (t.state, t.state_size) = (state.as_mut_ptr(), state.len());
        check(kopt_state_init(&opt, &t, 1, std::ptr::null()));
        for _ in 0..100 { check(kopt_optimizer_step(&mut opt, &t, 1)); }
    }
    println!("Rust   {:04x} {:04x} {:04x}", weight[0], weight[1], weight[999]);
}
