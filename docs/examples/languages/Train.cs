// Train.cs - the header called from C#, by P/Invoke.
using System;
using System.Runtime.InteropServices;

static unsafe class Train {
    const string Library = "kahan_opt";

    [StructLayout(LayoutKind.Explicit, Size = 200)]
    struct Optimizer { // the fields that are used here
        [FieldOffset(40)] public double lr;
        [FieldOffset(56)] public double weight_decay;
    }
    [StructLayout(LayoutKind.Explicit, Size = 96)]
    struct Tensor { [FieldOffset(0)] public void *weight; }

    [DllImport(Library)] static extern Optimizer kopt_adamw(double lr);
    [DllImport(Library)] static extern Tensor kopt_tensor_of(void *weight, void *grad, int format, UIntPtr n,
                                                             void *state, UIntPtr state_size);
    [DllImport(Library)] static extern UIntPtr kopt_state_size(ref Optimizer opt, UIntPtr n);
    [DllImport(Library)] static extern int kopt_state_init(ref Optimizer opt, ref Tensor t, float *weights);
    [DllImport(Library)] static extern int kopt_optimizer_step(ref Optimizer opt, ref Tensor tensors, UIntPtr count);
    [DllImport(Library)] static extern sbyte *kopt_result_string(int result);
    [DllImport(Library)] static extern long kopt_layout_of(string name);

    static void Check(int result) { if (result != 0) throw new Exception(new string(kopt_result_string(result))); }
    static void Expect(string name, long size) {
        if (kopt_layout_of(name) != size) throw new Exception(name + " is " + kopt_layout_of(name));
    }

    static void Main() {
        Expect("sizeof kopt_optimizer", sizeof(Optimizer));
        Expect("sizeof kopt_tensor", sizeof(Tensor));
        Expect("kopt_optimizer.lr: double", 40);
        Expect("kopt_optimizer.weight_decay: double", 56);
        var opt = kopt_adamw(1e-3);
        opt.weight_decay = 0.1;
        var n = (UIntPtr)1000;
        var weight = new ushort[1000];
        var grad = new ushort[1000];
        var state = new byte[(int)kopt_state_size(ref opt, n)];
        for (int i = 0; i < 1000; i++) grad[i] = 0x3F80; // 1 in bf16
        fixed (ushort *w = weight, g = grad)
        fixed (byte *s = state) { // the arrays stay where they are as long as the tensor points to them
            var t = kopt_tensor_of(w, g, 1, n, s, (UIntPtr)state.Length);
            Check(kopt_state_init(ref opt, ref t, null));
            for (int i = 0; i < 100; i++) Check(kopt_optimizer_step(ref opt, ref t, (UIntPtr)1));
        }
        Console.WriteLine("C#     {0:x4} {1:x4} {2:x4}", weight[0], weight[1], weight[999]);
    }
}
