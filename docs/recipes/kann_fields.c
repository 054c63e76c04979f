kopt_optimizer opt = kopt_adam(learning_rate); /* once */
opt.beta1 = 0, opt.beta2 = decay;
/* before step t, which counts from 1: */
const double correct = sqrt(1 - pow(decay, t));
opt.lr = learning_rate / correct, opt.eps = 1e-3 / correct, opt.step = (uint32_t)t - 1;
